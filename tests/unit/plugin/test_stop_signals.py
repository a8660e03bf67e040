"""Ctrl-C of a server's main process. That its other processes leave it to that one: ``tests/e2e/test_restart.py``."""

from __future__ import annotations

import signal
import subprocess
import sys

MAIN = """
import asyncio
from types import SimpleNamespace
from sglang_hcache.sglang_plugin.stopping import _stop_on_interrupt

async def serve():
    told = SimpleNamespace(sigterm_handler=lambda number: print("told", int(number), flush=True))
    _stop_on_interrupt(None, told)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(serve())
"""


def test_the_first_ctrl_c_is_a_sigterm_and_the_second_ends_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as main:
        assert main.stdout is not None
        try:
            assert main.stdout.readline() == "ready\n"
            main.send_signal(signal.SIGINT)
            assert main.stdout.readline() == f"told {int(signal.SIGINT)}\n"
            main.send_signal(signal.SIGINT)
            assert main.wait(10) == -signal.SIGINT
        finally:
            main.kill()
