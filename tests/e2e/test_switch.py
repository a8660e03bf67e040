"""The tier switched off and on again while its server runs, by SGLang's calls for storage backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.main import app
from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt, wait_for


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    folder = tmp_path_factory.mktemp("switch")
    config = folder / "hcache.yaml"
    config.write_text("restore_deadline_s: 120\n")
    arguments = [
        *("--model-path", str(tiny_model()), "--dtype", "float32", "--max-total-tokens", "4096"),
        *(
            "--hcache-config",
            str(config),
            "--hcache-dirs",
            str(folder / "store"),
            "--hcache-disk-size",
            "1GB",
        ),
        *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB", "--enable-metrics"),
    ]
    with TierServer(folder, arguments, admin_key="secret") as running:
        yield running
        running.assert_nothing_left()


SWITCH = "/hicache/storage-backend"
CLEARING = (
    ("POST", f"{SWITCH}/clear"),
    *(
        (method, path)
        for path in ("/clear_hicache_storage_backend", "/flush_cache")
        for method in ("GET", "POST")
    ),
)
NOBODYS = None, "wrong", "secrets"


def status(server: TierServer, method: str, path: str, key: str | None) -> int:
    """Of the answer to somebody who has ``key``."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"hicache_storage_backend": "hcache"} if method == "PUT" else None
    url = server.process.url + path
    return httpx.request(method, url, headers=headers, json=body, timeout=120, trust_env=False).status_code


def is_as(answer: Answer, expected: Answer) -> bool:
    return largest_difference(answer, expected) <= TOLERANCE


def looks_and_saves(server: TierServer) -> dict[str, int]:
    """How often the tier did something for a request."""
    server.settle()
    names = "lookup.requests", "restore.done", "restore.tokens", "host.chunks_sealed", "capture.rows"
    return {name: server.counter(name) for name in names}


def shown_by_top(server: TierServer) -> str:
    result = CliRunner().invoke(app, ["top", "--once", "--url", server.process.url], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_nothing_is_saved_or_restored_while_it_is_off(server: TierServer) -> None:
    stored, new = random_prompt(1, 400), random_prompt(2, 400)
    first = server.ask(stored)
    server.to_tiers()
    before = server.ask(stored)
    assert (before.restored, is_as(before, first)) == (384, True)
    server.to_tiers()
    chunks = server.state()["disk"]["chunks"]

    assert server.switch_off().status_code == 200
    assert server.state()["nothing_saved"] == "switched_off"
    assert "switched off: nothing is saved or restored" in shown_by_top(server)
    checked = CliRunner().invoke(app, ["top", "--check", "--url", server.process.url])
    assert checked.exit_code == 1
    assert checked.output.startswith("switched off: ")
    counted = looks_and_saves(server)
    off = server.ask(stored)
    assert (off.cached, is_as(off, first)) == (0, True)
    again = server.ask(stored)
    assert (again.device, is_as(again, first)) == (399, True), (
        "the device's cache is SGLang's, to the last token"
    )
    first_of_new = server.ask(new)
    server.to_tiers()
    assert looks_and_saves(server) == counted
    assert server.state()["disk"]["chunks"] == chunks, "what is stored stays"

    assert server.switch_on("file").status_code == 400
    assert server.state()["nothing_saved"] == "switched_off"
    assert server.switch_on().status_code == 200
    assert server.state()["nothing_saved"] is None
    assert server.state()["settings"]["disk_size"] == "1GB", "which SGLang has forgotten"
    assert "switched off" not in shown_by_top(server)
    after = server.ask(stored)
    assert (after.restored, is_as(after, first)) == (384, True)
    for restored in (0, 384):
        answer = server.ask(new)
        assert (answer.cached, is_as(answer, first_of_new)) == (restored, True)
        server.to_tiers()


def test_who_waits_or_is_saved_meanwhile(server: TierServer) -> None:
    """Off at once, with a request that runs and one that waits for its restore. SGLang's own handler refuses that."""
    decoded, waiting = random_prompt(3, 300), random_prompt(4, 600)
    first = server.ask(waiting)
    server.to_tiers()
    with ThreadPoolExecutor(2) as threads:
        with server.switched_on("hold_restore"), server.switched_on("slow_passes"):
            running = threads.submit(server.ask, decoded, tokens=400)
            wait_for(lambda: server.state()["captured_requests"] > 0, "a decoding request")
            restoring = threads.submit(server.ask, waiting)
            wait_for(lambda: server.state()["in_flight_tokens"] > 0, "a restore")
            assert server.switch_off().status_code == 200
            answer = restoring.result(timeout=120)
            assert not running.done()
        assert (answer.restored, is_as(answer, first)) == (0, True)
        counted = looks_and_saves(server)
        history = [*decoded, *running.result(timeout=120).tokens]
    assert looks_and_saves(server) == counted, "of the one that ran the rest is not saved"
    assert server.switch_on().status_code == 200
    server.assert_nothing_left()
    reference = server.recompute(history)
    found = server.ask(history)
    assert 256 <= found.restored < 640, "not what was decoded last"
    assert is_as(found, reference)
    server.settle()
    assert is_as(server.ask(waiting), first)


def test_who_may_clear_and_switch(server: TierServer) -> None:
    server.ask(random_prompt(5, 400))
    server.to_tiers()
    server.settle()
    before = server.state()
    assert before["disk"]["chunks"] > 0
    for key in NOBODYS:
        assert {status(server, *call, key) for call in (*CLEARING, ("DELETE", SWITCH))} == {401}
    assert [status(server, "GET", path, None) for path in ("/health", "/metrics")] == [200, 200]
    after = server.state()
    assert after["nothing_saved"] is None
    assert [after["disk"]["chunks"], after["host"]] == [before["disk"]["chunks"], before["host"]]
    assert server.switch_off().status_code == 200
    assert {status(server, "PUT", SWITCH, key) for key in NOBODYS} == {401}
    assert server.state()["nothing_saved"] == "switched_off"
    assert server.switch_on().status_code == 200
    assert {status(server, *call, "secret") for call in CLEARING} == {200}
    assert server.state()["disk"]["chunks"] == 0
