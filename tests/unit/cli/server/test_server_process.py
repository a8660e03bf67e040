"""A stand-in for the server: what the child process does, not what SGLang does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_hcache.cli.server import process as server_process
from sglang_hcache.cli.server.process import ServerProcess, ServerProcessError
from tests.waiting import wait_until

# Answers /health when it is asked again; has a child in its group that ignores SIGTERM.
SERVER = """
import http.server, os, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("child", child.pid, "variable", os.environ.get("VARIABLE"), flush=True)
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if asked else 503)
        asked.append(self.path)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every server run this Python code."""

    def use(code: str) -> None:
        monkeypatch.setattr(
            server_process, "prepare_launch", lambda args: ([sys.executable, "-c", code, *args], {})
        )

    return use


def _child(server: ServerProcess) -> psutil.Process:
    words = server.log_text().split()
    return psutil.Process(int(words[words.index("child") + 1]))


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_leaves_no_process_behind(run: Callable[[str], None], tmp_path: Path, end: str) -> None:
    run(SERVER)
    waited: list[float] = []
    server = ServerProcess([], log=tmp_path / "server.log", extra_env={"VARIABLE": "given"})
    server.start(waited.append)
    assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
    assert waited == sorted(waited)
    assert waited
    assert "variable given" in server.log_text()
    child = _child(server)
    getattr(server, end)()
    assert not server.is_running
    assert _is_gone(child)
    server.stop()  # again: nothing to do
    server.kill()


def test_starts_again_and_shows_only_the_last_log(run: Callable[[str], None], tmp_path: Path) -> None:
    run(SERVER)
    server = ServerProcess([], log=tmp_path / "server.log")
    server.start()
    first = server.pid
    server.kill()
    with server:
        assert server.pid != first
        assert server.log_text().count("variable") == 1
    assert not server.is_running


@pytest.mark.parametrize("given", [[], ["--nccl-port", "7"], ["--nccl-port=7"]])
def test_ports_that_no_outgoing_connection_takes(
    run: Callable[[str], None], tmp_path: Path, given: list[str]
) -> None:
    run("import sys, time; print('ports', *sys.argv[1:], flush=True); time.sleep(600)")
    server = ServerProcess(given, log=tmp_path / "server.log")
    server.launch()
    try:
        wait_until(lambda: server.log_text().endswith("\n"))
        words = server.log_text().replace("=", " ").split()
    finally:
        server.kill()
    ports = {flag: int(words[words.index(flag) + 1]) for flag in ("--port", "--nccl-port")}
    assert words.count("--nccl-port") == 1
    assert 20_000 <= ports["--port"] < 32_000
    assert ports["--nccl-port"] == 7 if given else 20_000 <= ports["--nccl-port"] < 32_000
    assert len(set(ports.values())) == 2


def test_arguments_need_not_be_utf_8(run: Callable[[str], None], tmp_path: Path) -> None:
    run("")
    log = tmp_path / "server.log"
    server = ServerProcess(["/mnt/\udcff", "--nccl-port", "7"], log=log)
    with pytest.raises(ServerProcessError, match="died while starting"):
        server.start()
    assert b"/mnt/\xff" in log.read_bytes()


def test_a_server_that_dies_shows_its_last_lines(run: Callable[[str], None], tmp_path: Path) -> None:
    run("import sys; print('the reason'); sys.exit(3)")
    server = ServerProcess([], log=tmp_path / "server.log")
    with pytest.raises(ServerProcessError, match=r"(?s)died while starting \(exit status 3\).*the reason"):
        server.start()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[2026-11-23] hcache: error: --hcache-dirs: no room", "--hcache-dirs: no room"),
        ("sglang serve: error: unrecognized --x", "unrecognized --x"),
    ],
)
def test_a_server_that_says_why_it_dies(
    run: Callable[[str], None], tmp_path: Path, line: str, reason: str
) -> None:
    run(f"import sys; print('usage:\\n many'); print({line!r}); print({line!r}); sys.exit(2)")
    server = ServerProcess([], log=tmp_path / "server.log")
    with pytest.raises(ServerProcessError) as error:
        server.start()
    assert str(error.value) == reason


def test_a_server_that_dies_of_an_exception_says_which_first(
    run: Callable[[str], None], tmp_path: Path
) -> None:
    line = "[2026-11-29 10:00:00] OSError: no such model 'x'"
    run(f"import sys; print('Traceback'); print({line!r}); print('killed'); sys.exit(1)")
    with pytest.raises(ServerProcessError) as error:
        ServerProcess([], log=tmp_path / "server.log").start()
    first, *rest = str(error.value).splitlines()
    assert first.endswith("(exit status 1): OSError: no such model 'x'; its log ends with:")
    assert rest[-1] == "  | killed"


def test_a_late_server_is_ended(run: Callable[[str], None], tmp_path: Path) -> None:
    run("import time; time.sleep(600)")
    server = ServerProcess([], log=tmp_path / "server.log", startup_timeout_s=0.5)
    with pytest.raises(ServerProcessError, match=r"did not answer within 0\.5 s"):
        server.start()
    assert not server.is_running


def test_members_of_a_group_whose_leader_died_are_ended(run: Callable[[str], None], tmp_path: Path) -> None:
    run(SERVER)
    server = ServerProcess([], log=tmp_path / "server.log")
    server.start()
    child = _child(server)
    psutil.Process(server.pid).kill()
    wait_until(lambda: not server.is_running)
    assert not _is_gone(child)
    server.stop()
    assert _is_gone(child)


STARTER = """
import os, pathlib, sys
from sglang_hcache.cli.server import process
code, log = sys.argv[1:]
process.prepare_launch = lambda args: ([sys.executable, "-c", code, *args], dict(os.environ))
server = process.ServerProcess([], log=pathlib.Path(log))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def test_ends_with_who_started_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", STARTER, SERVER, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        (child,) = server.children()
        starter.kill()
    try:
        wait_until(lambda: _is_gone(server) and _is_gone(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
