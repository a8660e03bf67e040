"""A directory as the running store uses it: every call has a deadline, and its outcome moves the health."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from sglang_hcache.core.errors import StoreError, StoreFullError, StoreIOError, StoreTimeoutError
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.workers import DeadlineCaller
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.files import SegmentFile
from sglang_hcache.store.volumes.health import FULL_ERRNOS, GONE_ERRNOS, READ_ONLY_ERRNOS, Health

T = TypeVar("T")

MEASURE_S = 60.0
"""To ask for the size of each file, of which there may be thousands."""


def storage_error(error: OSError, doing: str) -> StoreFullError | StoreIOError:
    """``error`` as one of ours: full when the device is full, late when it overran its deadline."""
    if error.errno in FULL_ERRNOS:
        return StoreFullError(f"{doing}: {error}")
    kind = StoreTimeoutError if isinstance(error, TimeoutError) else StoreIOError
    return kind(f"{doing}: {error}")


class Volume:
    """One directory, its health, and the thread on which its files are created, deleted and asked about.

    Args:
        patience_s: deadline of a call, seconds.
    """

    def __init__(self, directory: StoreDirectory, health: Health, patience_s: float) -> None:
        self.directory = directory
        self.stripe = 0
        """Its number in the store, once that is known (``agreement.in_place``)."""
        self.health = health
        self.want_of_room = ""
        """Why it takes no new segment although it is well; empty: it takes one."""
        self.patience_s = patience_s
        self._caller = DeadlineCaller(f"hcache-dir {directory.path}")

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def reason(self) -> str:
        """Why it is not healthy, or stores nothing new although it is."""
        return self.health.reason or self.want_of_room

    def call(
        self,
        function: Callable[[], T],
        doing: str,
        *,
        writing: bool = False,
        blame: bool = True,
        patience_s: float | None = None,
    ) -> T:
        """What ``function()`` returns. Without ``blame`` one failure says nothing about the device, unless it hangs, is
        gone or takes no writes.

        Args:
            patience_s: its deadline, seconds; None: that of others.

        Raises:
            StoreFullError, StoreIOError, StoreTimeoutError: it failed, or the directory is out.
        """
        self._refuse_if_out(doing)
        try:
            return self.attempt(function, patience_s)
        except FileNotFoundError as error:
            self.check_presence()
            self._refuse_if_out(doing)  # the file went with its directory, and may come back with it
            raise storage_error(error, doing) from error
        except OSError as error:
            if blame or error.errno in GONE_ERRNOS | READ_ONLY_ERRNOS:
                self.health.failed(error, writing=writing)
            raise storage_error(error, doing) from error
        except StoreFullError:
            raise
        except StoreIOError as error:
            cause = error.__cause__
            self.health.failed(cause if isinstance(cause, OSError) else OSError(str(error)), writing=writing)
            raise

    def _refuse_if_out(self, doing: str) -> None:
        if not self.health.readable:
            raise StoreIOError(f"{doing}: {self.path} is out: {self.health.reason}")

    def allocated_bytes(self) -> int:
        self.free_bytes()  # a device that hangs is not waited for as long as many files are
        return self.call(self.directory.allocated_bytes, "cannot ask for sizes", patience_s=MEASURE_S)

    def free_bytes(self) -> int:
        return self.call(self.directory.free_bytes, "cannot ask for free space")

    def segment_files(self) -> dict[int, SegmentFile]:
        self.free_bytes()
        return self.call(self.directory.segment_files, "cannot list the segments", patience_s=MEASURE_S)

    def segment_sizes(self) -> dict[int, int]:
        return {number: file.size for number, file in self.segment_files().items()}

    def let_go(self, files: dict[tuple[int, bool], OpenFile], name: tuple[int, bool]) -> None:
        """Take ``files[name]`` out some time, which closes it unless it is in use. Never waits."""
        self._caller.post(partial(files.__delitem__, name))

    def attempt(self, function: Callable[[], T], patience_s: float | None = None) -> T:
        """``function()`` whatever the health says, with the deadline, and without an effect on the health.

        Raises:
            OSError, StoreError: whatever it raises; TimeoutError if it is late.
        """
        return self._caller.call(function, patience_s or self.patience_s)

    def check_presence(self) -> None:
        """Take the volume out if its directory is not the one that was opened."""
        try:
            present = self.attempt(self.directory.is_present)
        except OSError as error:
            self.health.failed(error, writing=False)
            return
        if not present:
            self.health.take_out("the directory was deleted or unmounted")

    def close(self, timeout_s: float) -> bool:
        """Release the lock, once: behind a call that hangs, when that has ended. False if it is not released yet."""
        self._caller.post(self.directory.lock.release)
        return self._caller.close(timeout_s)


def in_each(volumes: Sequence[Volume], write: Callable[[Volume], None], doing: str) -> set[int]:
    """Have ``write`` done in each of ``volumes``; returns in which it was. Raises StoreError: in none."""
    failure: StoreError = StoreIOError("no directory takes writes")
    done = set[int]()
    for volume in volumes:
        try:
            volume.call(partial(write, volume), doing, writing=True)
            done.add(volume.stripe)
        except StoreError as error:
            failure = error
    if not done:
        raise failure
    return done
