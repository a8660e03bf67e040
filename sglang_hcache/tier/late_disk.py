"""A disk tier that could not be opened at start is tried again, while the server serves without it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from sglang_hcache.core.errors import HCacheError
from sglang_hcache.store import DiskStore, workers

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0


class LateDisk:
    """Ends with the first try that goes well. None is made while a thread that the last one began hangs: the next one
    would leave another one behind.

    Args:
        open_: the disk tier, or an error; on a thread of its own.
        attach: takes it, on the same thread; after an error it is closed and opened again. Not after :meth:`close`.
        failed: is told each time why not.
        pause_s: before the first try; it doubles each time, up to a minute.
    """

    def __init__(
        self,
        open_: Callable[[], DiskStore],
        attach: Callable[[DiskStore], None],
        failed: Callable[[str], None],
        pause_s: float = 2.0,
    ) -> None:
        self._open = open_
        self._attach = attach
        self._failed = failed
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="hcache-late-disk", daemon=True).start()

    def close(self) -> None:
        """Try no more. Waits for no disk: one that is being opened is closed at once."""
        with self._lock:
            self._closed.set()

    def _run(self) -> None:
        pause_s = self._pause_s
        hanging: set[threading.Thread] = set()
        while not self._closed.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if any(thread.is_alive() for thread in hanging):
                continue
            before = workers()
            try:
                self._open_and_attach()
                return
            except (HCacheError, OSError) as error:
                self._failed(str(error))
            except Exception as error:
                logger.exception("hcache: the disk tier cannot be opened")
                self._failed(repr(error))
            hanging = workers() - before

    def _open_and_attach(self) -> None:
        with contextlib.ExitStack() as undo:
            disk = self._open()
            undo.callback(disk.close)
            with self._lock:
                if not self._closed.is_set():
                    self._attach(disk)
                    undo.pop_all()
