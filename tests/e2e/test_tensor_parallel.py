"""Two ranks on a CPU, each with its part of K and V."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.main import app
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.store.inspect.view import StoreView
from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt
from tests.patched_sglang import installed_sglang

PROMPTS = [random_prompt(seed, 450) for seed in range(2)]


def server_of(ranks: int, model: Path, folder: Path, *more: str) -> TierServer:
    """The ranks share the cores as ``hcache serve`` has it."""
    arguments = ("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "3072")
    return TierServer(folder, [*arguments, "--tp-size", str(ranks), *more], admin_key="secret")


def gained(server: TierServer, before: dict[str, int]) -> dict[str, int]:
    """What was counted of restores since."""
    counters = server.state()["counters"]
    more = {name: count - before.get(name, 0) for name, count in counters.items()}
    return {name: count for name, count in more.items() if name.startswith("restore.") and count}


def ask_ranks(*arguments: str) -> list[dict[str, Any]]:
    """What ``hcache store`` answers for each rank."""
    result = CliRunner().invoke(app, ["store", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    ranks = json.loads(result.stdout)["ranks"]
    assert [answer["rank"] for answer in ranks] == [0, 1]
    return list(ranks)


def erase_the_tenant(store: Path) -> None:
    """By the ID that the first rank lists: nothing of it is left on any."""
    listed = [answer["namespaces"] for answer in ask_ranks("ls", "--namespaces", str(store))]
    (tenant,) = (space["namespace"] for space in listed[0] if "tenant" in space["owner"])
    keys: list[bytes] = []
    for rank in range(2):
        with StoreView.open([rank_dir(store, rank, 2)]) as view:
            places = [run.place for run in view.runs() if run.place.namespace_id.hex() == tenant]
        keys += {key for place in places for key in place.keys}
    assert len(set(keys)) == 14, "each rank has its own"
    cleared = ask_ranks("clear", "--yes", "--namespace", tenant, str(store))
    assert [answer["chunks_removed"] for answer in cleared] == [7, 7]
    files = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert not [each for each in (bytes.fromhex(tenant), tenant.encode(), *keys) if each in files]


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(kv_heads=2)


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> list[Answer]:
    """Of one rank, without the tier."""
    with server_of(1, model, tmp_path / "one", "--hierarchical-cache", "off", "--hcache-cpu-fixes") as one:
        answers = [one.ask(prompt) for prompt in PROMPTS]
    assert len({answer.tokens for answer in answers}) == len(PROMPTS), "else equality would show little"
    return answers


def test_both_restore_their_part_or_none(model: Path, expected: list[Answer], tmp_path: Path) -> None:
    def ask(number: int) -> tuple[Answer, bool]:
        """An answer, and whether it is right."""
        answer = server.ask(PROMPTS[number])
        return answer, largest_difference(answer, expected[number]) <= TOLERANCE

    store = tmp_path / "store"
    tier = [
        *("--hcache-method", "auto", "--hcache-dirs", str(store), "--hcache-disk-size", "400MB"),
        *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
    ]
    with server_of(2, model, tmp_path / "two", *tier) as server, server.switched_on("always_restore"):
        assert "init_model_parallel_group" in server.hooked_functions(installed_sglang())
        state = server.state()
        assert (state["ranks"], set(state["layers"])) == (2, {"kv"})
        for number in range(len(PROMPTS)):
            answer, is_right = ask(number)
            assert (answer.cached, is_right) == (0, True)
        server.to_tiers()
        before = server.state()["counters"]
        answer, is_right = ask(0)
        assert (answer.device, answer.restored, is_right) == (0, 448, True)
        found = gained(server, before)
        assert (found["restore.done"], found["restore.tokens"]) == (1, 448)
        assert server.post("/configure_logging", {"log_level": "debug"}).status_code == 200
        for rank in ("0", "1"):
            server.to_tiers()
            with server.switched_on("corrupt_restored_key", rank):
                answer, is_right = ask(0)
            assert (answer.restored, is_right) == (448, False)
            server.flush_device()
            before = server.state()["counters"]
            with server.switched_on("fail_read", rank):
                answer, is_right = ask(0)
            assert (answer.cached, is_right) == (0, True), "the other one does not use its part either"
            # The first one's numbers, the only ones that anybody sees, say so whoever it was.
            failed = "restore.failed" if rank == "0" else "restore.failed_on_another_rank"
            assert gained(server, before) == {failed: 1}
        assert "restore ends without a result: it failed on another rank" in server.process.log_text()
        server.to_tiers()
        for switch, restored in ((server.switch_off, 0), (server.switch_on, 448)):
            assert switch().status_code == 200
            answer, is_right = ask(0)
            assert (answer.cached, is_right) == (restored, True)
            server.flush_device()
        server.ask(PROMPTS[0], extra_key="alice")
        server.assert_nothing_left()
        server.settle()
        server.process.stop()
        assert (
            server.process.log_text().count(
                "chunks to disk since the signal; 0 were not written and are lost"
            )
            == 2
        )
        erase_the_tenant(store)
        server.process.start()
        answer, is_right = ask(1)
        assert (answer.disk, answer.device, is_right) == (448, 0, True)
        for rank in range(2):
            assert list(rank_dir(store, rank, 2).glob("*.seg"))
        verified = ask_ranks("verify", str(store))
        assert [(answer["damaged_chunks"], answer["runs"] > 0) for answer in verified] == [(0, True)] * 2
        assert server.post("/clear_hicache_storage_backend").status_code == 200
        server.flush_device()
        answer, is_right = ask(1)
        assert (answer.cached, is_right) == (0, True)
        server.assert_nothing_left()
