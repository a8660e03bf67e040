"""Something that goes on for as long as something else is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` on a daemon thread called ``name`` inside the ``with`` block.

    Args:
        work: gets an event, and returns soon after that is set: the end of the block waits for it.
    """
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
