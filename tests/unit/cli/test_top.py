"""``hcache top``: what it shows of a server's state."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from sglang_hcache.cli.main import app
from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.top import Sample, render
from sglang_hcache.core.config import environment_with
from sglang_hcache.core.errors import ConfigError, HCacheError

HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"
FULL = {"reason": "nothing new is stored", "takes_writes": False}


def state(**counters: int) -> dict[str, Any]:
    """As ``Bridge.state`` returns it."""
    return {
        "counters": {name.replace("__", "."): count for name, count in counters.items()},
        "measures": {},
        "namespace": "00ff",
        "saving": False,
        "nothing_saved": None,
        "layers": ["kv", "hidden"],
        "host": {"slots": 10, "free": 2, "clean": 1, "dirty": 5, "chunk_bytes": 1000},
        "disk": {
            "chunks": 1234,
            "bytes": 5_000_000,
            "cap_bytes": 10_000_000,
            "written_today_bytes": 7_000_000,
            "write_budget_bytes": None,
            "quarantined": 0,
            "clearing_pending": False,
            "engine": "posix",
            "directories": [
                {"path": "/a", "condition": "healthy", "reason": "", "takes_writes": True},
                {"path": "/b", "condition": "out", "reason": "EIO", "takes_writes": False},
            ],
        },
        "requests": {"pending": 2, "running": 0},
        "captured_requests": 1,
        "in_flight_tokens": 640,
    }


def picture(console: Console, *arguments: Any, **options: Any) -> list[str]:
    with console.capture() as capture:
        console.print(render("http://here", *arguments, **options))
    return capture.get().splitlines()


def shown(sample: Sample, before: Sample | None) -> dict[str, list[str]]:
    """Lines by their first words."""
    console = Console(width=160, highlight=False)
    lines = [line.rstrip() for line in picture(console, sample, before) if line.strip()]
    return {line.strip().split("  ")[0]: line.split() for line in lines}


def test_sizes_and_health() -> None:
    found = shown(Sample(0.0, state()), None)
    assert " ".join(found["host"]).endswith("8.0 KB 10.0 KB 6 5 not written yet; 2 more unfinished")
    assert "1,234" in found["disk"]
    assert found["/b: out: EIO"]
    assert "2 pending" in " ".join(found["requests: 2 pending; 1 being saved; slots in flight: 640"])


def test_what_somebody_has_to_do_something_about_comes_first() -> None:
    """In a window of 80 columns."""
    console = Console(width=80, highlight=False)
    told = state() | {"nothing_saved": "old_weights"}
    told["disk"]["clearing_pending"] = True
    lines = picture(console, Sample(0.0, told), None)
    assert lines[2] == "nothing is saved: KV of earlier weights is on the device (POST /flush_cache)"
    assert lines[3] == "what was cleared would be back after a restart: no directory took the note"
    assert not any("nothing is saved" in line for line in picture(console, Sample(0.0, state()), None))


def test_that_the_tier_is_switched_off() -> None:
    lines = picture(Console(width=160), Sample(0.0, state() | {"nothing_saved": "switched_off"}), None)
    assert lines[2].startswith("switched off: nothing is saved or restored")


def test_totals_and_rates() -> None:
    before = Sample(10.0, state(restore__tokens_disk=1000, store__bytes_read=0))
    after = Sample(12.0, state(restore__tokens_disk=1640, store__bytes_read=4_000_000, restore__failed=1))
    found = shown(after, before)
    assert found["tokens from disk"][-2:] == ["1,640", "320"]
    assert found["bytes read from disk"][-4:] == ["4.0", "MB", "2.0", "MB"]
    assert found["restores failed"][-2:] == ["1", "0.5"]
    assert found["restores done"][-1] == "0"


def test_what_a_restore_takes() -> None:
    measures = {
        "restore.recompute_seconds": {"count": 1, "sum": 0.04},
        "restore.read_seconds": {"count": 4, "sum": 0.048},
        "restore.project_seconds": {"count": 4, "sum": 6.0},
        "restore.queue_seconds": {"count": 4, "sum": 0.0},
        "restore.prediction_ratio": {"count": 4, "sum": 4.4},
    }
    line = "a restore takes on average, since the start: read 12 ms, project 1.50 s, recompute 10 ms"
    assert line in shown(Sample(0.0, state() | {"measures": measures}), None)
    assert not any(text.startswith("a restore") for text in shown(Sample(0.0, state()), None))


def test_times_are_those_since_the_last_look() -> None:
    def look(at: float, restores: int, read_s: float) -> Sample:
        of_all = {
            "restore.read_seconds": {"count": restores, "sum": read_s},
            "wait.pending_seconds": {"count": 2 * restores, "sum": 4 * restores},
        }
        return Sample(at, state() | {"measures": of_all})

    found = shown(look(2.0, 12, 1.5), look(0.0, 10, 1.0))
    assert "a restore takes on average, lately: read 250 ms" in found
    assert "requests waited on average, lately: pending 2.00 s" in found
    idle = shown(look(2.0, 10, 1.0), look(0.0, 10, 1.0))
    assert "a restore takes on average, since the start: read 100 ms" in idle


@pytest.mark.parametrize(
    ("waits", "before"), [(3, {"restore__done": 9}), (3, {"restore__failed": 1}), (20, {})]
)
def test_a_server_that_was_started_again_begins_anew(waits: int, before: dict[str, int]) -> None:
    def look(at: float, waits: int, waited_s: float, **counters: int) -> Sample:
        measures = {"wait.pending_seconds": {"count": waits, "sum": waited_s}}
        return Sample(at, state(**counters) | {"measures": measures})

    found = shown(look(60.0, 10, 0.5, restore__done=2), look(0.0, waits, 24.0, **before))
    assert "requests waited on average, lately: pending 50 ms" in found
    assert found["restores done"][-2:] == ["2", "0.033"]


def test_seconds_saved_and_lost() -> None:
    def look(at: float, saved_s: float) -> Sample:
        lost = {f"restore.lost_seconds_{why}": {"count": 1, "sum": 0.75} for why in ("slower", "late")}
        return Sample(
            at, state() | {"measures": {"restore.saved_seconds": {"count": 9, "sum": saved_s}, **lost}}
        )

    found = shown(look(2.0, 30.5), look(0.0, 20.5))
    assert found["seconds that they saved"][-2:] == ["30.5", "5"]
    assert found["seconds lost by restores"][-1] == "1.5"


def checked(monkeypatch: pytest.MonkeyPatch, *options: str, **told: Any) -> Result:
    server = Server(looks=1)
    monkeypatch.setattr(server, "tier_state", lambda: state() | told)
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: server)
    return CliRunner().invoke(app, ["top", "--check", *options])


def test_a_check_names_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    told = state(capture__errors=2, store__errors=1)
    told["disk"]["clearing_pending"] = True
    result = checked(monkeypatch, nothing_saved="old_weights", counters=told["counters"], disk=told["disk"])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "/b: out: EIO",
        "nothing is saved: KV of earlier weights is on the device (POST /flush_cache)",
        "what was cleared would be back after a restart: no directory took the note",
        "unexpected errors since the start: 2 in capture, 1 in store; the log has them, please report",
    ]
    assert json.loads(checked(monkeypatch, "--json").stdout) == {"problems": ["/b: out: EIO"]}
    told["disk"]["directories"] = [state()["disk"]["directories"][0] | FULL]
    told["disk"]["clearing_pending"] = False
    result = checked(monkeypatch, disk=told["disk"])
    assert (result.exit_code, result.stdout) == (1, "/a: healthy: nothing new is stored\n")


def test_a_check_of_a_server_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for well in ({"disk": None}, {"disk": None, "nothing_saved": "method"}):
        result = checked(monkeypatch, **well)
        assert (result.exit_code, result.stdout) == (0, "")


def test_a_directory_that_takes_nothing_new_is_told_in_full() -> None:
    """With a path that is longer than a line, too."""
    told = state()
    path = "/mnt/" + "x" * 150
    told["disk"]["directories"][0] |= {"path": path, **FULL}
    lines = picture(Console(width=80, highlight=False), Sample(0.0, told), None)
    assert f"{path}:healthy:nothingnewisstored" in "".join(lines).replace(" ", "")


@pytest.mark.parametrize("broken", [{"disk": {"directories": [{}]}}, {"counters": []}, {"nothing_saved": []}])
@pytest.mark.parametrize("options", [["--check"], ["--once", "--interval", "0.1"], ["--interval", "0.1"]])
def test_a_state_of_another_version_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, options: list[str], broken: dict[str, Any]
) -> None:
    server = Server(looks=9)
    monkeypatch.setattr(server, "tier_state", lambda: state(store__errors=1) | broken)
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: server)
    result = CliRunner().invoke(app, ["top", *options])
    assert isinstance(result.exception, HCacheError)
    assert "its state is not that of this version of hcache" in str(result.exception)
    assert "\n" not in str(result.exception)


def test_without_a_disk_tier() -> None:
    found = shown(Sample(0.0, state() | {"disk": None}), None)
    assert "no disk tier" in " ".join(found["host"])
    assert "disk" not in found


@pytest.mark.parametrize("command", [("top", "--once"), ("chat",)])
@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "127.0.0.1:99999", "ftp://here", "", "http://"])
def test_what_is_no_address_is_refused(command: tuple[str, ...], url: str) -> None:
    result = CliRunner().invoke(app, [*command, "--url", url], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'--url'" in result.output
    assert "no address" in result.output


@pytest.mark.parametrize(
    "url", ["http://me:pa55@here:x", "me:pa55@here:99999", "ftp://me:pa55@here", "http://me:pa55/@here"]
)
def test_a_password_in_an_address_that_is_refused_is_not_told(url: str) -> None:
    result = CliRunner().invoke(app, ["top", "--url", url], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "no address" in result.output
    assert "pa55" not in result.output


def test_a_password_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["top", "--url", "http://me:pa55@127.0.0.1:1", "--once"])
    assert "http://127.0.0.1:1 cannot be reached" in str(result.exception)
    assert "pa55" not in str(result.exception)
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: Server(looks=2))
    result = CliRunner().invoke(app, ["top", "--url", "http://me:pa55@there", "--once", "--interval", "0.1"])
    assert result.stdout.startswith("http://there ")


class Server:
    """Stands for ``ServerClient``: answers ``looks`` times, then somebody presses Ctrl-C."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def tier_state(self) -> dict[str, Any]:
        if self.looks == 0:
            raise KeyboardInterrupt
        self.looks -= 1
        return state(restore__done=self.looks)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_into_a_pipe_each_look_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: Server(looks=3))
    result = CliRunner().invoke(app, ["top", "--interval", "0.1"])
    assert result.exit_code == 0
    assert result.stdout.count("restores done") == 3


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_answer_that_does_not_come_does_not_end_what_looks_again(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    server, looks = Server(looks=3), [lost := ChatError("no answer within 10 s")]
    answer = server.tier_state

    def tier_state() -> dict[str, Any]:
        if server.looks == 2 and looks:
            raise looks.pop()
        return answer()

    monkeypatch.setattr(server, "tier_state", tier_state)
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: server)
    result = CliRunner().invoke(app, ["top", "--interval", "0.1", *options])
    assert result.exit_code == 0
    assert result.stderr == f"hcache: {lost}\n"
    assert result.stdout.count("restore.done" if options else "restores done") == 3
    server.looks, looks[:] = 2, [lost]
    result = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", *options])
    assert result.exception is lost, "status 2"


def test_where_no_server_is_the_way_to_name_one_is_told() -> None:
    result = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:1", "--once"])
    assert "is a server running there? --url names another" in str(result.exception)


def test_a_low_window_shows_what_went_wrong() -> None:
    wrong = {
        "restore__failed": 2,
        "demote__chunks_dropped_full": 7,
        "store__io_errors": 3,
        "store__errors": 1,
    }
    told = state(restore__done=5, **wrong) | {"nothing_saved": "old_weights"}
    lines = picture(Console(width=80), Sample(0.0, told), None, trouble="the server does not answer")
    assert lines[0] == "the server does not answer"
    assert [line.partition(":")[0] for line in lines[3:6]] == [
        "nothing is saved",
        "unexpected errors since the start",
        "/b",
    ]
    assert lines[6] == "since the start: restores failed 2, dropped: disk_full 7, I/O errors 3"
    text = "\n".join(lines[7:])
    assert "/a: healthy" in text
    assert "/b: out" not in text
    for words in ("restores failed", "dropped: disk_full", "I/O errors", "unexpected errors"):
        assert text.count(words) == 1


def test_what_did_not_go_wrong_takes_no_room() -> None:
    told = state()
    del told["disk"]["directories"][1]
    lines = picture(Console(width=80), Sample(0.0, told), None)
    assert len(lines) <= 24
    assert "since the start:" not in "".join(lines)
    assert not any("I/O errors" in line for line in lines)


@pytest.mark.parametrize("interval", ["inf", "1e30", "nan", "0"])
def test_an_interval_that_nobody_can_wait_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    monkeypatch.setattr("sglang_hcache.cli.top.ServerClient", lambda *_, **__: Server(looks=1))
    result = CliRunner().invoke(app, ["top", "--interval", interval], env={"COLUMNS": "200"})
    assert "--interval" in f"{result.output}{result.exception}"
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)


def in_terminal(kind: str, tmp_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """``hcache top`` of a :class:`Server` that goes on answering; and the other side of its terminal."""
    program = tmp_path / "top.py"
    program.write_text(
        "from sglang_hcache.cli import top\n"
        "from tests.unit.cli.test_top import Server\n"
        "top.ServerClient = lambda *_, **__: Server(looks=10**6)\n"
        "top.top(interval=0.1)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env=environment_with({"TERM": kind, "PYTHONPATH": str(Path(__file__).parents[3])}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    return process, ours


def read_until(terminal: int, words: bytes) -> bytes:
    """What it writes up to ``words``, to its end or for a minute."""
    text, ends = b"", time.monotonic() + 60
    while words not in text and select.select([terminal], [], [], max(0.0, ends - time.monotonic()))[0]:
        try:
            text += os.read(terminal, 65536)
        except OSError:
            break
    return text


def test_sigterm_gives_the_cursor_back(tmp_path: Path) -> None:
    process, terminal = in_terminal("xterm", tmp_path)
    try:
        assert HIDDEN in read_until(terminal, b"restores done")
        process.terminate()
        assert SHOWN in read_until(terminal, SHOWN)
        read_until(terminal, b"the end")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_terminal_that_cannot_draw_over_gets_look_after_look(tmp_path: Path) -> None:
    process, terminal = in_terminal("dumb", tmp_path)
    try:
        looks = b"".join(read_until(terminal, b"bytes written to disk") for _ in range(2))
        assert looks.count(b"restores done") >= 2
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
