"""How much room there is, and how much there could be: the floor, the file systems, what eviction would free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_hcache.core.errors import StoreError, StoreFullError, StoreIOError
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.format.geometry import mask_of
from sglang_hcache.store.volumes.volume import Volume


class Room:
    """Measures; changes nothing."""

    def __init__(self, config: StoreConfig, volumes: Sequence[Volume], catalog: Catalog) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog

    def usable(self, file_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Directories that can take a file of ``file_bytes`` above the floor: now, and if all is evicted that may be.

        Of one look, for a directory that fails between two would seem to lack room.
        """
        freeable = self.freeable()
        now: list[int] = []
        by_eviction: list[int] = []
        for stripes, free in self._rooms():
            need = (file_bytes + FILE_SLACK_BYTES) * len(stripes) + self._config.free_floor_bytes
            if free >= need:
                now += stripes
            if free + sum(freeable[stripe] for stripe in stripes) >= need:
                by_eviction += stripes
        return tuple(sorted(now)), tuple(sorted(by_eviction))

    def short(self, need: int, members: Iterable[int]) -> int:
        """Directories, as bits, on file systems that cannot give each of ``members`` ``need`` bytes above the floor."""
        wanted = set(members)
        mask = 0
        for stripes, free in self._rooms():
            count = len(wanted.intersection(stripes))
            if count and free - count * need < self._config.free_floor_bytes:
                mask |= mask_of(stripes)
        return mask

    def _rooms(self) -> list[tuple[list[int], int]]:
        """Directories where room can be made, by file system, with its free bytes."""
        groups: dict[int, tuple[list[int], int]] = {}
        for volume in self._volumes:
            if not volume.health.can_delete:
                continue
            try:
                device, free = volume.call(
                    lambda volume=volume: (volume.directory.device(), volume.directory.free_bytes()),  # type: ignore[misc]
                    "cannot ask for free space",
                )
            except StoreError:
                continue  # taken out by now, or asked again at the next segment
            groups.setdefault(device, ([], free))[0].append(volume.stripe)
        return list(groups.values())

    def freeable(self) -> Counter[int]:
        """What evicting everything that may be evicted would free, by directory."""
        total: Counter[int] = Counter()
        for segment in self._catalog.evictable():
            total.update(segment.freeable_bytes)
        return total

    def why_none(self) -> StoreError:
        """Why no directory can take a new segment."""
        well = [volume for volume in self._volumes if volume.health.writable]
        if well:
            return StoreFullError(
                f"a new segment of {format_bytes(self._config.file_bytes)} would leave {well[0].path} less free than "
                f"the floor of {format_bytes(self._config.free_floor_bytes)} (--hcache-disk-free-floor)"
            )
        volume = self._volumes[0]
        if any(item.health.is_full for item in self._volumes):
            return StoreFullError(f"{volume.path}: {volume.health.reason}")
        return StoreIOError(f"no directory takes writes; {volume.path} is out: {volume.health.reason}")
