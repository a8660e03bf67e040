"""What goes so that there is room: the cap, the free-space floor, eviction (docs/store-format.md, "Eviction")."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sglang_hcache.core.errors import StoreError, StoreFullError, StoreIOError
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import FILE_SLACK_BYTES, StoreConfig
from sglang_hcache.store.format.geometry import mask_of, members_of
from sglang_hcache.store.free_space import FreeSpace, Shortage, Usable
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)

_EVICTIONS_IN_VAIN = 3
"""Segments that gained nothing, before another one is not tried now."""
_SEGMENTS_IN_VAIN = 2
"""Full ones, that went where nothing can be written all the same, ..."""
_RELIEF_S = 600.0
"""... before others go there only so often, seconds, the first of them at once."""
_FLOOR_WARNING_S = 600.0


class Eviction:
    """Keeps cap and floor. Not thread-safe: ``Space`` holds its lock."""

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        catalog: Catalog,
        remover: Remover,
        free_space: FreeSpace,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._catalog = catalog
        self._remover = remover
        self._free_space = free_space
        self._may_warn = Throttle(_FLOOR_WARNING_S)
        self._may_relieve = defaultdict[int, Throttle](lambda: Throttle(_RELIEF_S))

    def next_members(self, file_bytes: int) -> tuple[int, ...]:
        """Directories with room for a file of a new segment. If none has it, the coldest segments are evicted first.

        While some have room, nothing is evicted for a place in the others: else all would hold only as much as the
        one with the least room. Directories that take no writes count only if no other one could get room: they may
        take writes again when they have some.
        """
        while True:
            usable = self._free_space.usable(file_bytes)
            if file_bytes == self._config.file_bytes:  # not for a run that needs more
                self._note_want_of_room(usable)
            possible = {stripe for stripe in usable.by_eviction if self._volumes[stripe].health.writable}
            possible = possible or {*usable.by_eviction}
            members = tuple(stripe for stripe in usable.now if stripe in possible)
            if members or not possible or not possible.isdisjoint(usable.soon):
                return members
            if not self._evict_to_gain(self._not_in_vain(possible)):
                return ()

    def _note_want_of_room(self, usable: Usable) -> None:
        """For people: where others have filled the disk so far that the tier stores nothing new, whatever it evicts."""
        for volume in self._volumes:
            lacks_room = volume.health.can_delete and volume.stripe not in usable.by_eviction
            volume.want_of_room = (
                "nothing new is stored: others fill the disk, and less than the floor of "
                f"{self._config.floor_text} (--hcache-disk-free-floor) would stay free"
                if lacks_room
                else ""
            )

    def why_no_members(self, file_bytes: int) -> StoreError:
        """Why no directory can take a file of a new segment."""
        well = [volume for volume in self._volumes if volume.health.writable]
        if well:
            return StoreFullError(
                f"a new segment of {format_bytes(file_bytes)} would leave {well[0].path} less free than "
                f"the floor of {self._config.floor_text} (--hcache-disk-free-floor)"
            )
        volume = self._volumes[0]
        if any(item.health.is_full for item in self._volumes):
            return StoreFullError(f"{volume.path}: {volume.health.reason}")
        health = volume.health
        return StoreIOError(
            f"no directory takes writes; {volume.path} is {health.condition}: {health.reason}"
        )

    def make_room(self, file_bytes: int, members: Sequence[int]) -> str:
        """Evict until a segment in ``members`` fits cap and floor; says why it does not fit, if so."""
        need = file_bytes + FILE_SLACK_BYTES
        budget = self._config.segments_budget_bytes - need * len(members)
        while (over := self.used_bytes() - budget) > 0:
            if over > sum(self._free_space.freeable().values()) or not self._evict_to_gain():
                return (
                    f"the disk tier is full: {format_bytes(self._config.size_bytes)} (--hcache-disk-size), and "
                    "nothing can be evicted now"
                )
        # Whoever chose the members has seen that room. But what went for the cap must be seen as free before new files
        # take its place: a later look would wait for it to show up, and evict too little meanwhile.
        if not self._keep_floor(need, members):
            return f"the floor of {self._config.floor_text} (--hcache-disk-free-floor)"
        return ""

    def restore_cap(self) -> None:
        """Evict what is above the cap, as far as possible."""
        while self.used_bytes() > self._config.segments_budget_bytes and self._evict_to_gain():
            pass

    def restore_floor(self) -> None:
        """Evict where less than the floor is free.

        Also where that is not enough: whoever filled the disk is helped by what the tier gives back.
        """
        everywhere = range(len(self._volumes))
        if (shortages := self._free_space.shortages(0, everywhere)) and self._may_warn():
            logger.warning(
                "hcache: less than %s (--hcache-disk-free-floor) is free on the disk of %s: what the tier holds there "
                "is given up, and nothing new is stored there until more is free",
                self._config.floor_text,
                ", ".join(
                    str(self._volumes[stripe].path) for item in shortages for stripe in members_of(item.mask)
                ),
            )
        self._keep_floor(0, everywhere)

    def relieve(self, members: Iterable[int]) -> None:
        """A device is full though its file system shows room (a quota, no inodes left): one segment there goes.

        How often that happens is bounded by how often the directory is tried again, and by what it gains.
        """
        self._evict_to_gain(self._not_in_vain(item for item in members if self._volumes[item].health.is_full))

    def used_bytes(self) -> int:
        """Sum over segments in use and files that could not be removed."""
        in_use = sum(segment.accounted_bytes for segment in self._catalog.segments())
        return in_use + self._remover.leftover_bytes

    def _not_in_vain(self, stripes: Iterable[int]) -> int:
        """Those of these directories, as bits, where more may go for the sake of writing.

        Not where the disk is full, some went, and nothing could be written since: others use a quota up, or a snapshot
        keeps what is deleted. There one more goes now and then, for it may be that nobody else makes room.
        """
        most = _SEGMENTS_IN_VAIN * self._config.file_bytes
        healths = {stripe: self._volumes[stripe].health for stripe in stripes}
        return mask_of(
            stripe
            for stripe, health in healths.items()
            if not health.is_full or health.freed_in_vain < most or self._may_relieve[stripe]()
        )

    def _keep_floor(self, need: int, members: Iterable[int]) -> bool:
        """Evict where less than the floor and ``need`` for each of ``members`` is free; False if that is not enough.

        Never more than a single look found missing: some file systems show only seconds later that files are gone.
        """
        while shortages := self._free_space.shortages(need, members):
            made_up = [self._evict_to_free(item) for item in shortages if item.missing > 0]
            if not made_up or not all(made_up):
                return False
        return True

    def _evict_to_free(self, shortage: Shortage) -> bool:
        """Evict until so much was deleted since the look; False if that is not possible."""
        while self._free_space.deleted_in(shortage.mask) < shortage.missing:
            if not self._evict_to_gain(shortage.mask):
                return False
        return True

    def _evict_to_gain(self, within: int = -1) -> bool:
        """Evict until something is gained ``within`` directories; False if nothing is.

        A device that fails must not cost the whole cache: what is gained on another one does not count, and nothing
        more goes where files stay.
        """
        within &= mask_of(volume.stripe for volume in self._volumes if volume.health.can_delete)
        for _ in range(_EVICTIONS_IN_VAIN):
            within &= ~self._remover.stopped()
            before = self._free_space.deleted_in(within)
            if not (self._remover.finish_one(within) or self._remover.evict_coldest(within)):
                return False
            if self._free_space.deleted_in(within) > before:
                return True
        return False
