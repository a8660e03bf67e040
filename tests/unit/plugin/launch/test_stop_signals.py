"""Ctrl-C and SIGHUP of a server's main process. That the others leave it to that one: ``tests/e2e/test_restart.py``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAIN = """
import asyncio
from types import SimpleNamespace
from sglang_hcache.sglang_plugin.launch.stopping import _stop_on_interrupt

async def serve():
    told = SimpleNamespace(sigterm_handler=lambda number: print("told", int(number), flush=True))
    _stop_on_interrupt(None, told)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(serve())
"""


HANGUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_{})\n"


@contextmanager
def main_process(before: str = "") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", before + MAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as main:
        assert main.stdout is not None
        try:
            assert main.stdout.readline() == "ready\n"
            yield main
        finally:
            main.kill()


def told(main: subprocess.Popen[str]) -> str:
    assert main.stdout is not None
    return main.stdout.readline()


def test_the_first_ctrl_c_is_a_sigterm_and_the_second_ends_it() -> None:
    with main_process() as main:
        main.send_signal(signal.SIGINT)
        assert told(main) == f"told {int(signal.SIGINT)}\n"
        main.send_signal(signal.SIGINT)
        assert main.wait(60) == -signal.SIGINT


def test_a_closed_terminal_is_a_sigterm() -> None:
    with main_process(HANGUP.format("DFL")) as main:  # else what runs the tests may have it ignored
        main.send_signal(signal.SIGHUP)
        assert told(main) == f"told {int(signal.SIGHUP)}\n"


def test_nohup_is_obeyed() -> None:
    with main_process(HANGUP.format("IGN")) as main:
        main.send_signal(signal.SIGHUP)
        main.send_signal(signal.SIGINT)
        assert told(main) == f"told {int(signal.SIGINT)}\n"
