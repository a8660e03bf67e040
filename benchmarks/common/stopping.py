"""Commands that are ended before their end: by Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import psutil

AGAIN_S = 1.0
"""What comes so soon after the first signal belongs to it: ``timeout`` sends every signal twice."""
_PATIENCE_S = 30.0
"""For processes that are killed."""


class Stopped(KeyboardInterrupt):
    """What is measured ends here. Passes through clean-up like Ctrl-C, and event loops let it through."""


class Stopping:
    """The first signal ends what is measured, so that the command can write what it has; a second one ends the process.

    A context manager for the main thread. A signal that the caller of the process ignores (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first one that came."""
        self._came_at = 0.0
        self._raises = False
        self._old: dict[signal.Signals, object] = {}
        self._others = frozenset[psutil.Process]()

    @property
    def cause(self) -> str:
        """The signal for people."""
        assert self.signal is not None
        return "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name

    @property
    def exit_status(self) -> int:
        """As a shell has it: 130 after Ctrl-C, 143 after SIGTERM. 0: there was no signal."""
        return 0 if self.signal is None else 128 + self.signal

    def until_stopped(self, work: Callable[[], None]) -> None:
        """Do ``work`` to its end or to the first signal; then no process that it started is left.

        Signals at any other time are noted only.
        """
        try:
            self._raises = True
            if self.signal is None:
                work()
            self._raises = False
        except Stopped:
            pass
        except Exception as error:
            if self.signal is None:
                raise
            print(f"while ending: {error!r}", file=sys.stderr)
        finally:
            self._raises = False
        if self.signal is not None:  # there may be a server whose start was interrupted
            psutil.wait_procs(self._kill_children(), _PATIENCE_S)

    def __enter__(self) -> Stopping:
        self._others = frozenset(psutil.Process().children(recursive=True))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._came_at = signal.Signals(number), now
            if self._raises:
                self._raises = False
                raise Stopped
        elif now - self._came_at > AGAIN_S:
            self._kill_children()
            os.write(sys.stderr.fileno(), b"ended at once: scratch folders may be left\n")
            os._exit(128 + number)

    def _kill_children(self) -> list[psutil.Process]:
        children = [each for each in psutil.Process().children(recursive=True) if each not in self._others]
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return children
