"""Ctrl-C, SIGHUP and the end of a server's main process. Others leave signals to it: ``tests/e2e/test_restart.py``."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

_TIMEOUT_S = 120.0  # SGLang is imported

MAIN = """
import gc
gc.disable()  # imports take less time
import asyncio, multiprocessing, os, signal, sys, time
from types import SimpleNamespace
from sglang_hcache.sglang_plugin.launch.stopping import _run_below_parent, _stop_on_interrupt

async def serve(is_server):
    sys.modules["sglang.srt.entrypoints.http_server"] = SimpleNamespace(get_global_state=lambda: is_server or None)
    told = SimpleNamespace(sigterm_handler=lambda number: print("told", int(number), flush=True))
    _stop_on_interrupt(None, told)
    print("ready", os.getpid(), flush=True)
    await asyncio.sleep(600)

def detokenizer(main, answer):
    os.write(answer, b"began, ")
    while os.getppid() == main:  # as if it still imported modules
        time.sleep(0.01)
    _run_below_parent(lambda: os.write(answer, b"runs without a main process, "))

def killed_while_others_import():
    answer, theirs = os.pipe()
    if main := os.fork():
        os.close(theirs)
        said = os.read(answer, 100)
        os.kill(main, signal.SIGKILL)
        os.waitpid(main, 0)
        while more := os.read(answer, 100):
            said += more
        print(said.decode() + "ended", flush=True)
        return
    multiprocessing.get_context("fork").Process(target=detokenizer, args=(os.getpid(), theirs)).start()
    os.close(theirs)
    time.sleep(600)

for what_is_done_on_a_hangup in sys.stdin:
    if what_is_done_on_a_hangup.strip() == "killed while others import":
        killed_while_others_import()
        continue
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
        continue
    is_server = what_is_done_on_a_hangup.strip() != "a program with an Engine"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may have it ignored
    signal.signal(signal.SIGHUP, getattr(signal, what_is_done_on_a_hangup.strip() if is_server else "SIG_DFL"))
    try:
        asyncio.run(serve(is_server))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(0)
"""


class Mains:
    """Starts main processes one after the other: forked, for SGLang takes long to be imported."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            self._lines.put(line.rstrip())

    def start(self, hangup: str = "SIG_DFL") -> int:
        """The process id of a new one."""
        assert self._parent.stdin is not None
        print(hangup, file=self._parent.stdin, flush=True)
        word, pid = self.said().split()
        assert word == "ready"
        return int(pid)

    def be_killed_while_others_import(self) -> str:
        """What a main process's detokenizer did then."""
        assert self._parent.stdin is not None
        print("killed while others import", file=self._parent.stdin, flush=True)
        return self.said()

    def said(self) -> str:
        """The next line; ``queue.Empty`` if none comes."""
        return self._lines.get(timeout=_TIMEOUT_S)

    def end(self, main: int) -> None:
        os.kill(main, signal.SIGKILL)
        assert self.said() == f"ended {-signal.SIGKILL}"

    def close(self) -> None:
        with self._parent:
            os.killpg(self._parent.pid, signal.SIGKILL)  # also what hangs: it holds the pipe open
            self._reader.join(_TIMEOUT_S)


@pytest.fixture(scope="module")
def mains() -> Iterator[Mains]:
    made = Mains()
    yield made
    made.close()


def test_the_first_ctrl_c_is_a_sigterm_and_the_second_ends_it(mains: Mains) -> None:
    main = mains.start()
    os.kill(main, signal.SIGINT)
    assert mains.said() == f"told {int(signal.SIGINT)}"
    os.kill(main, signal.SIGINT)
    assert mains.said() == f"ended {-signal.SIGINT}"


def test_a_closed_terminal_is_a_sigterm(mains: Mains) -> None:
    main = mains.start()  # what runs the tests may have it ignored
    os.kill(main, signal.SIGHUP)
    assert mains.said() == f"told {int(signal.SIGHUP)}"
    mains.end(main)


def test_nohup_is_obeyed(mains: Mains) -> None:
    main = mains.start("SIG_IGN")
    os.kill(main, signal.SIGHUP)
    os.kill(main, signal.SIGINT)
    assert mains.said() == f"told {int(signal.SIGINT)}"
    mains.end(main)


def test_a_program_that_uses_an_engine_is_interrupted(mains: Mains) -> None:
    main = mains.start("a program with an Engine")
    os.kill(main, signal.SIGINT)
    assert mains.said() == "interrupted"
    assert mains.said() == "ended 0"


def test_others_end_with_it_also_if_they_still_import(mains: Mains) -> None:
    assert mains.be_killed_while_others_import() == "began, ended"
