"""What a new server on the same folder serves, after a graceful stop and after kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.main import app
from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt, wait_for
from tests.e2e.test_serving import assert_same_pool


def server_on(folder: Path, model: Path, *more: str) -> TierServer:
    arguments = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--hcache-dirs", f"{folder / 'one'},{folder / 'two'}"),
        *(
            "--enable-cache-report",
            "--hcache-disk-size",
            "1GB",
            "--hcache-disk-free-floor",
            "100MB",
            "--hcache-host-size",
            "64MB",
        ),
        *more,
    ]
    return TierServer(folder, arguments)


def chat(server: TierServer) -> int:
    """Tokens of a conversation that came from a cache."""
    messages = [{"role": "user", "content": "Who was the first to see it, and when did it happen? " * 20}]
    body = {"model": "m", "max_tokens": 4, "messages": messages}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def signal_all(server: TierServer, *numbers: int) -> int:
    """What a terminal does on Ctrl-C, and systemd: signals reach every process. Chunks saved by them."""
    state = server.state()
    for number in numbers:
        os.killpg(server.process.pid, number)
    server.process.stop()  # sends another SIGTERM, which changes nothing, and waits
    log = server.process.log_text()
    saved = re.search(r"stopping: wrote (\d+) chunks to disk since the signal; 0 were not written", log)
    assert saved is not None, log[-4000:]
    print("before:", state, "log:", log[-4000:], sep="\n")  # shown if it is another number
    return int(saved[1])


def erase_the_tenant(folder: Path, model: str) -> None:
    """There is one, and what the others have stored stays."""

    def store(*arguments: str) -> Any:
        dirs = (str(folder / "one"), str(folder / "two"))
        result = CliRunner().invoke(app, ["store", *arguments, "--json", *dirs])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    spaces = store("ls", "--namespaces")["namespaces"]
    assert [space["owner"]["model"] for space in spaces] == [model] * 2
    (tenant,) = (space for space in spaces if "tenant" in space["owner"])
    cleared = store("clear", "--yes", "--namespace", tenant["namespace"])
    assert cleared["chunks_removed"] == tenant["chunks"] == 14
    (left,) = store("ls", "--namespaces")["namespaces"]
    assert "tenant" not in left["owner"]
    assert store("verify")["damaged_chunks"] == 0


def check_restored(server: TierServer, prompt: list[int], before: Answer) -> None:
    after = server.ask(prompt)
    assert (after.disk, after.host, after.device) == ((len(prompt) - 1) // 64 * 64, 0, 0)
    assert largest_difference(after, before) <= TOLERANCE


def test_restarts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    stopped, evicted, through = (random_prompt(seed, 900) for seed in (1, 2, 3))
    with server_on(tmp_path, tiny_model()) as server:
        first = server.ask(stopped)
        assert chat(server) == 0
        recomputed = server.recompute(evicted, rid="probe-recomputed")
        server.settle()
        # Nothing was evicted: what is saved so far exists in host memory only. A graceful stop writes it.
        assert server.state()["disk"]["chunks"] == 0
        assert signal_all(server, signal.SIGINT) > 14
    erase_the_tenant(tmp_path, tiny_model().name)
    with server_on(tmp_path, tiny_model()) as server:
        check_restored(server, stopped, first)
        assert chat(server) > 256
        server.flush_device()
        check_restored(server, stopped, first)
        server.flush_device()
        promoted = server.ask(stopped)  # what is restored from the disk twice is in host memory then
        assert (promoted.disk, promoted.host, promoted.device) == (0, 896, 0)
        assert largest_difference(promoted, first) <= TOLERANCE
        assert server.counter("host.chunks_promoted") == 14
        locks = [(folder / "lock").read_text().split()[0] for folder in (tmp_path / "one", tmp_path / "two")]
        assert locks == [str(server.process.pid)] * 2, "not the scheduler's, which nobody should end alone"
        server.ask(evicted)
        server.to_tiers()
        server.settle()
        server.process.kill()
    # Another chat template makes other tokens of the same conversation.
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}Q: {{ message['content'] }}{% endfor %} A:")
    through_args = ("--hcache-write-policy", "write_through", "--chat-template", str(template))
    with server_on(tmp_path, tiny_model(), *through_args) as server:
        assert chat(server) == 0
        again = server.ask(evicted, rid="probe-restored")
        assert again.disk == 896
        assert largest_difference(again, recomputed) <= TOLERANCE
        assert_same_pool(server, "restored", "recomputed")
        third = server.ask(through)
        server.settle()
        assert server.state()["host"]["dirty"] == 0
        server.process.kill()
    # Other weights in a folder of the same shape: nothing of the above may be served, before it has the right ones.
    with server_on(tmp_path, tiny_model(seed=1)) as server:
        assert server.state()["disk"]["chunks"] > 0
        for prompt in (stopped, evicted, through):
            assert server.ask(prompt).cached == 0
        server.settle()
        load = server.post("/update_weights_from_disk", {"model_path": str(tiny_model())})
        assert load.json()["success"], load.text
        check_restored(server, through, third)
        server.flush_device()
        with server.switched_on("corrupt_restored_key"), pytest.raises(AssertionError):
            check_restored(server, through, third)
        server.assert_nothing_left()
        server.settle()  # the flush in there writes all that is in host memory by the time that it comes to it
        server.ask(random_prompt(4, 900))
        server.settle()
        assert signal_all(server, signal.SIGTERM, signal.SIGHUP) == 14  # systemd with SendSIGHUP=yes


def check_without_disk(server: TierServer, let_go: Callable[[], None]) -> None:
    """It serves, from its host tier alone, and says why; from both once the other server has let the disks go."""
    with server:
        reason = f"is in use by process {os.getpid()}; stop it or use other directories (--hcache-dirs)"
        log = server.process.log_text()
        assert log.index("this server runs without its disk tier") < log.index("Load weight begin")
        assert re.search(rf"runs without it, and tries again .*{re.escape(reason)}", log)
        assert "no disk tier (it cannot be opened yet)" in log
        prompt = random_prompt(7, 500)
        before = server.ask(prompt)
        server.to_tiers()
        after = server.ask(prompt)
        assert (after.host, after.disk) == (448, 0)
        assert largest_difference(after, before) <= TOLERANCE
        state = server.state()
        assert state["host"]["clean"] == 7, "nothing waits for a disk"
        assert state["host"]["dirty"] == 0
        assert [item["condition"] for item in state["disk"]["directories"]] == ["out", "out"]
        assert reason in state["disk"]["directories"][0]["reason"]
        let_go()
        wait_for(lambda: server.state()["disk"]["engine"] != "none", "the disk tier to be opened")
        wait_for(lambda: "the disk tier is open now" in server.process.log_text(), "it to be told")
        assert [item["condition"] for item in server.state()["disk"]["directories"]] == ["healthy", "healthy"]
        late = random_prompt(8, 900)
        before = server.ask(late)
        server.to_tiers()
        both = 7 + 14
        wait_for(
            lambda: server.state()["disk"]["chunks"] == both, "what is new, and what was there, to be on disk"
        )
        for seed in range(100, 100 + server.state()["host"]["slots"] // 14):
            server.ask(random_prompt(seed, 900), tokens=1)
        server.to_tiers()
        from_disk = server.ask(late)
        assert from_disk.disk > 0, "host memory holds what came since"
        assert from_disk.host + from_disk.disk == 896
        assert largest_difference(from_disk, before) <= TOLERANCE
        server.assert_nothing_left()
        server.process.stop()
        server.process.start()
        check_restored(server, late, before)


def test_a_stop_writes_what_is_in_memory_before_the_last_request_is_over(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Who stops a server may end it before its longest request does so."""
    with server_on(tmp_path, tiny_model()) as server, ThreadPoolExecutor(1) as threads:
        server.ask(random_prompt(5, 900))
        server.settle()
        assert server.state()["disk"]["chunks"] == 0
        with server.switched_on("slow_passes"):
            running = threads.submit(server.ask, random_prompt(6, 64), tokens=2500)
            wait_for(lambda: server.state()["captured_requests"] > 0, "a request to run")
            os.kill(server.process.pid, signal.SIGTERM)
            wait_for(lambda: server.state()["disk"]["chunks"] >= 15, "both prompts to be on disk")
            assert server.state()["captured_requests"] == 1, "it runs still"
            server.process.kill()
        assert running.exception(120) is not None


def test_a_second_server_on_the_folder_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from sglang_hcache.cli.server.process import ServerProcessError
    from sglang_hcache.core.observer import Counters
    from sglang_hcache.store import DiskStore, StoreConfig

    folders = (tmp_path / "one", tmp_path / "two")
    holder = DiskStore.open(
        StoreConfig(dirs=folders, size_bytes=10**9, free_floor_bytes=10**8, segment_bytes=10**7), Counters()
    )
    try:
        server = server_on(tmp_path, tiny_model())
        with pytest.raises(ServerProcessError, match="is in use by process"), server:
            pass
        log = server.process.log_text()
        assert log.index("if it still is when the model is loaded") < log.index("Load weight begin")
        assert f"is in use by process {os.getpid()}; stop it or use other directories (--hcache-dirs)" in log
        check_without_disk(
            server_on(
                tmp_path, tiny_model(), "--hcache-disk-at-start", "optional", "--hcache-host-size", "16MB"
            ),
            holder.close,
        )
    finally:
        holder.close()
