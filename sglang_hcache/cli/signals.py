"""Signals of commands that import for long, and of those that have something to clean up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Around imports that take long: Ctrl-C ends the process at once.

    Some libraries take the ``KeyboardInterrupt`` for a module that is missing. A handler of ours stays, and so does a
    signal that our caller ignores.
    """
    is_plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_plain:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_plain:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Interruptions:
    """Lets the first signal through as ``KeyboardInterrupt``, and none after it: that would end the clean-up."""

    def __init__(self) -> None:
        self._is_ignoring = False

    def ignore(self) -> None:
        """From here on the first one does nothing either. Say it where clean-up begins that must reach its end."""
        self._is_ignoring = True

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """For ``signal.signal``."""
        if not self._is_ignoring:
            self._is_ignoring = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[Interruptions]:
    """SIGTERM and SIGHUP end the command like Ctrl-C, through its clean-up, which further signals do not end.

    For the main thread. A signal that our caller ignores (``nohup``) stays ignored.
    """
    interruptions = Interruptions()
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = {number: handler for number, handler in old.items() if handler is not signal.SIG_IGN}
    try:
        for number in taken:
            signal.signal(number, interruptions.handle)
        yield interruptions
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
