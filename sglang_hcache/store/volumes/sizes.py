"""What a directory takes on its disk, and what is free there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.config import DirectoryStats
from sglang_hcache.store.volumes.volume import Volume


class SizeMeter:
    """Asks for the sizes of a directory's files, in many calls: whoever opens one of them to read it must not wait
    until thousands have been asked for.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._parts: Iterator[int] | None = None
        """Of a sum that is not complete yet."""
        self._sum = 0
        self._physical = 0

    def measure(self, num_parts: int | None = None) -> tuple[int, int]:
        """Allocated bytes of the directory, as they were when all parts were asked last; free ones of its file system.

        Args:
            num_parts: at most so many are asked now, and the next call goes on from there; None: all.

        Raises:
            StoreError: the directory does not answer. The next call begins anew.
        """
        parts, self._parts = self._parts, None
        if parts is None or num_parts is None:
            parts, self._sum = self._volume.directory.allocated(), 0
        for _ in count() if num_parts is None else range(num_parts):
            part = self._volume.call(partial(next, parts, None), "cannot ask for sizes")
            if part is None:
                self._physical = self._sum
                break
            self._sum += part
        else:
            self._parts = parts
        return self._physical, self._volume.call(
            self._volume.directory.free_bytes, "cannot ask for free space"
        )

    def stats(self, num_parts: int | None = None) -> DirectoryStats:
        """How the directory is, as far as it answers; see :meth:`measure`."""
        try:
            physical, free = self.measure(num_parts)
        except StoreError:
            physical, free = 0, -1
        volume = self._volume
        return DirectoryStats(volume.path, str(volume.health.condition), volume.health.reason, physical, free)
