"""How much room there is, and how much there could be: the floor, the file systems, what eviction would free."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_hcache.core.errors import StoreError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.format.geometry import mask_of
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.volume import Volume

_AWAITED_S = 10.0
"""So long deleted files may take to show as free space: XFS, ZFS and btrfs free blocks in the background."""

_TAKEN_SHARE = 0.1
"""Where all but this share of deleted files shows up, others took the rest meanwhile."""


class _Awaited:
    """Bytes that were deleted on one file system, and that it does not show as free yet.

    They look the same as bytes that others took while the files were deleted, and those never show up. So each deletion
    has a deadline of its own. With a common one, later deletions would prolong the wait for earlier ones, and a
    neighbour who writes without end would push the store below the floor.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[float, int]] = []
        """Bytes by deletion, oldest first, and until when they are waited for."""
        self._last_free: int | None = None

    @property
    def size(self) -> int:
        return sum(size for _, size in self._pending)

    def look(self, free: int, freed: int) -> None:
        """``free`` bytes are seen, and ``freed`` ones were deleted since the last look."""
        now = time.monotonic()
        shown = 0 if self._last_free is None else max(0, free - self._last_free)
        self._last_free = free
        pending = [*self._pending, (now + _AWAITED_S, freed)]
        # The newest first: what never comes must keep its age.
        while shown and pending:
            until, size = pending.pop()
            if size > shown:
                pending.append((until, size - shown))
            shown -= min(size, shown)
        self._pending = [(until, size) for until, size in pending if size and until > now]
        if self.size <= freed * _TAKEN_SHARE:
            self._pending = []


@dataclass(frozen=True, slots=True)
class _FileSystem:
    """What a look at one file system says."""

    stripes: list[int]
    """Directories on it where room can be made."""
    floor: int
    """What stays free on it, bytes."""
    free: int
    awaited: int
    """Bytes that will be free as well, without further evictions."""


@dataclass(frozen=True, slots=True)
class Usable:
    """Directories that can take another segment's file above the floor."""

    now: tuple[int, ...]
    soon: tuple[int, ...]
    """When what was deleted shows up as free."""
    by_eviction: tuple[int, ...]
    """If all is evicted that may be."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A file system with too little free."""

    mask: int
    """Directories on it, as bits."""
    missing: int
    """Bytes to be freed, besides those that were freed and do not show up yet; nothing if not positive."""


class FreeSpace:
    """Measures, and remembers what was deleted meanwhile. Not thread-safe: ``Space`` holds its lock."""

    def __init__(self, config: StoreConfig, volumes: Sequence[Volume], catalog: Catalog) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog
        self._freed: Counter[int] = Counter()
        """Bytes of files deleted since the last look, by directory."""
        self._awaited: dict[int, _Awaited] = {}
        """By device."""

    def note_deleted(self, stripe: int, size: int) -> None:
        """A file of ``size`` bytes was deleted."""
        self._freed[stripe] += size

    def deleted_in(self, within: int) -> int:
        """Bytes of files deleted ``within`` directories, as bits, since the last look."""
        return sum(size for stripe, size in self._freed.items() if within >> stripe & 1)

    def usable(self, file_bytes: int) -> Usable:
        """What one look finds, because a directory that fails between two would seem to lack room."""
        freeable: Counter[int] | None = None  # takes long with many segments, and mostly there is room
        now: list[int] = []
        soon: list[int] = []
        by_eviction: list[int] = []
        for found in self._look():
            need = (file_bytes + FILE_SLACK_BYTES) * len(found.stripes) + found.floor
            later = found.free + found.awaited
            now += found.stripes if found.free >= need else []
            soon += found.stripes if later >= need else []
            if later < need:
                freeable = self.freeable() if freeable is None else freeable
                later += sum(freeable[stripe] for stripe in found.stripes)
            by_eviction += found.stripes if later >= need else []
        return Usable(tuple(sorted(now)), tuple(sorted(soon)), tuple(sorted(by_eviction)))

    def shortages(self, need: int, members: Iterable[int]) -> list[Shortage]:
        """The file systems that cannot give each of ``members`` ``need`` bytes above the floor."""
        wanted = set(members)
        found = []
        for item in self._look():
            count = len(wanted.intersection(item.stripes))
            missing = item.floor + count * need - item.free
            if count and missing > 0:
                found.append(Shortage(mask_of(item.stripes), missing - item.awaited))
        return found

    def _look(self) -> list[_FileSystem]:
        groups: dict[int, tuple[list[int], int, int]] = {}
        for volume in self._volumes:
            if not volume.health.can_delete:
                continue
            try:
                device, free, total = volume.call(
                    partial(_room, volume.directory), "cannot ask for free space"
                )
            except StoreError:
                continue  # taken out by now, or asked again at the next segment
            groups.setdefault(device, ([], free, self._config.floor_of(total)))[0].append(volume.stripe)
        found = []
        for device, (stripes, free, floor) in groups.items():
            awaited = self._awaited.setdefault(device, _Awaited())
            awaited.look(free, sum(self._freed.pop(stripe, 0) for stripe in stripes))
            found.append(_FileSystem(stripes, floor, free, awaited.size))
        return found

    def freeable(self) -> Counter[int]:
        """What evicting everything that may be evicted would free, by directory."""
        total: Counter[int] = Counter()
        for segment in self._catalog.evictable():  # thousands: Counter.update takes several times as long
            for stripe, size in segment.freeable_bytes.items():
                total[stripe] += size
        return total


def _room(directory: StoreDirectory) -> tuple[int, int, int]:
    """Device number, free bytes and size of its file system. Raises OSError."""
    return directory.device(), directory.free_bytes(), directory.total_bytes()
