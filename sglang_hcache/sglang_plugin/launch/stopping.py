"""A signal to stop is for the server's main process, which lets the tier save before all of it ends.

A terminal sends Ctrl-C, and SIGHUP when it is closed, and systemd its SIGTERM, to every process of a server. SGLang's
other processes would end at once, and with the scheduler what exists only in host memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import kill_itself_when_parent_died
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_hcache.sglang_plugin.seam import hooking

logger = logging.getLogger(__name__)

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_HANDLER = "sglang.srt.managers.tokenizer_manager.SignalHandler"


def install() -> None:
    """In the server's main process, before it starts others.

    Raises:
        ConfigError: as :func:`hooking.apply`.
    """
    hooking.apply(
        {
            f"{_ENGINE}._launch_detokenizer_subprocesses": (_launch_detokenizer, HookType.AROUND),
            f"{_HANDLER}.__init__": (_stop_on_interrupt, HookType.AFTER),
            f"{_HANDLER}.sigterm_handler": (_tell_scheduler, HookType.AFTER),
        }
    )


def end_with_parent() -> None:
    """SIGKILL ends this process of SGLang's with the one that started it, also if it ended while we imported modules.

    SGLang asks for the signal only after that, and then nobody sends it: its detokenizer would wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # SGLang did not start us
        return
    kill_itself_when_parent_died()
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, in a process that SIGKILL ends with its parent. For its main thread."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def save_when_told(save: Callable[[], object]) -> None:
    """In the scheduler's process, after :func:`leave_signals_to_parent`: SIGTERM means that a stop has begun.

    Args:
        save: may be called at any moment of the main thread, so it must take no lock.
    """
    signal.signal(signal.SIGTERM, lambda *_: save())


def _tell_scheduler(*_: object) -> None:
    """SGLang does so when the last request is over: later, perhaps, than whoever stops the server waits for it."""
    for process in collect_scheduler_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def _launch_detokenizer(
    original: Callable[..., Any], *args: Any, run_detokenizer_process_func: Callable[..., None], **kwargs: Any
) -> Any:
    run = functools.partial(_run_below_parent, run_detokenizer_process_func)
    return original(*args, run_detokenizer_process_func=run, **kwargs)


def _run_below_parent(run: Callable[..., None], *args: Any) -> None:
    """What such a process runs: no plugin is loaded there, so it is not hooked."""
    end_with_parent()  # first: who ignores signals must not be left behind
    leave_signals_to_parent()
    run(*args)


def _stop_on_interrupt(_result: None, handler: Any, *_args: object, **_kwargs: object) -> None:
    """When SGLang begins to handle SIGTERM in its loop: so are SIGHUP and the first Ctrl-C; the second ends us.

    In a server: of a program that uses ``Engine`` the loop is run only inside of calls, and these signals are its own.
    """
    http_server = sys.modules.get(_HTTP_SERVER)
    if http_server is None or http_server.get_global_state() is None:
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        logger.warning(
            "hcache: Ctrl-C: stopping when running requests have ended, then saving; Ctrl-C again ends at once without "
            "saving"
        )
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        handler.sigterm_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, handler.sigterm_handler, signal.SIGHUP)
