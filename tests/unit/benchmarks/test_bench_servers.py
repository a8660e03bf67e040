"""How the servers that benchmarks compare are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.server.process import ServerProcessError
from sglang_hcache.device.memory import host_buffer

Import = Callable[[str], Any]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_a_model_without_weights_gets_dummy_ones(bench: Import, tmp_path: Path, name: str) -> None:
    model = bench("common.model")
    bench("gpu.model_folder").write_model(tmp_path, bench("gpu.shapes").shape_named("llama-2-13b"))
    assert model.load_arguments(tmp_path) == ["--load-format", "dummy"]
    opened = model.BenchModel.open(tmp_path, name="m")
    assert opened.header["weights"] == "dummy"
    assert len(opened.ordinary_tokens) == opened.header["vocab"] == 32000
    (tmp_path / name).touch()
    assert model.load_arguments(tmp_path) == []
    assert "weights" not in model.BenchModel.open(tmp_path, name="m").header


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_server_of_a_method_has_a_disk_or_none(bench: Import, tmp_path: Path, has_disk: bool) -> None:
    servers = bench("serving.servers")
    sizes = servers.sizes_for(
        device_contexts=2,
        mean_context=1000,
        longest_context=1200,
        requests_at_once=False,
        host_bytes=2**26,
        disk_bytes=2**30 if has_disk else 0,
        kv_token_bytes=1024,
        quick=True,
    )
    logs = tmp_path / "logs"
    server = servers._server("hidden", tmp_path, tmp_path, sizes, logs)
    settings = (tmp_path / "hidden.yaml").read_text()
    assert ("dirs:" in settings, "disk_size:" in settings) == (has_disk, has_disk)
    assert server.log == logs / "hidden.log"
    servers._server("auto", tmp_path, tmp_path, sizes, logs)
    engines = {
        name: (tmp_path / f"{name}.yaml").read_text().count("io_engine: posix") for name in ("hidden", "auto")
    }
    assert engines == {"hidden": 1, "auto": 1}, "not what each chooses by itself"


@pytest.mark.parametrize("together", [False, True])
def test_a_pair_starts_at_once_or_in_turns(
    bench: Import, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    pair = bench("serving.pair")
    started: list[int] = []
    monkeypatch.setattr(pair, "launch_together", lambda servers: started.append(len(servers)))

    class Server:
        def kill(self) -> None:
            started.append(0)

    with pair.running(
        {"off": Server(), "tier": Server()}, Progress(disable=True), together=together
    ) as seconds:
        assert started == ([2] if together else [1, 1])
        assert (seconds is None) is together
    assert started[-2:] == [0, 0]


def test_only_what_measures_nothing_starts_beside_another(
    bench: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    overhead = bench("overhead")
    for gpu in (True, False):
        monkeypatch.setattr(overhead, "has_gpu", lambda gpu=gpu: gpu)
        together = [kind for kind in ("auto", "hybrid", "hidden", "kv") if overhead._start_together(kind)]
        assert together == (["hidden", "kv"] if gpu else [])


@pytest.mark.parametrize("dies", [True, False])
def test_who_died_is_told_with_the_end_of_its_log(
    bench: Import, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    client = bench("serving.token_client")
    monkeypatch.setattr(client, "_DEATH_S", 0.1)
    log = "".join(f"line {number}\n" for number in range(99))

    class Server:
        url = "http://127.0.0.1:1"

        def __init__(self, alive: int) -> None:
            self._alive = alive

        @property
        def is_running(self) -> bool:
            """For so many questions."""
            self._alive -= 1
            return self._alive >= 0

        def log_text(self) -> str:
            return log

    async def ask(_clients: Any) -> None:
        raise ChatError("http://127.0.0.1:1: ConnectError")

    servers = {"recompute": Server(1000), "kv": Server(1 if dies else 1000)}
    with pytest.raises(ServerProcessError if dies else ChatError) as caught:
        client.ask_servers(servers, ask)
    if dies:
        assert str(caught.value).startswith("kv: the server died; its log ends with:\n  | line 74\n")
        assert str(caught.value).endswith("  | line 98")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_of_host_memory_counts_what_is_resident(bench: Import) -> None:
    resident = bench("serving.pair").host_memory_bytes
    me = SimpleNamespace(pid=os.getpid())
    before = resident(me)
    buffer = host_buffer(64 * 2**20)
    assert resident(me) == before
    buffer[: 8 * 2**20] = 1
    assert 8 * 2**20 <= resident(me) - before <= 12 * 2**20  # in huge pages, of which two are touched in part
