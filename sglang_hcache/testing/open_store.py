"""What tests look at inside of an open store: the one place that knows how its parts are called there."""

from __future__ import annotations

from collections.abc import Collection

from sglang_hcache.store import DiskStore
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.keeper import Keeper
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.space import Space
from sglang_hcache.store.volumes.volume import Volume


class Inside:
    """The parts of ``store``, as they are now."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.volumes: list[Volume] = [*store._volumes]
        self.catalog: Catalog = store._catalog
        self.space: Space = store._space
        self.saved: SavedState = store._saved
        self.keeper: Keeper = store._keeper

    def run_of(self, key: bytes) -> StoredRun:
        """The run that serves a chunk."""
        return self.catalog._chunks[key]

    def runs(self) -> list[StoredRun]:
        """By age."""
        found = [run for segment in self.catalog.segments() for run in segment.runs]
        return sorted(found, key=lambda run: (run.place.segment, run.place.age))

    @property
    def by_use(self) -> list[int]:
        """Numbers of segments, those that were used last at the end."""
        return [*self.catalog._segments]

    @property
    def reserved_bytes(self) -> int:
        """What counts against the cap, what is kept for small files included."""
        return self.space.used_bytes() + self.store._config.reserve_bytes

    @property
    def floor(self) -> float:
        """The least score of a segment that is used now."""
        return self.catalog._floor

    @property
    def active(self) -> Segment | None:
        """The segment that is being filled."""
        return self.space._active

    @property
    def leftovers(self) -> Collection[Segment]:
        """Segments out of use whose files are not gone."""
        return self.space._remover.leftovers

    @property
    def is_kept(self) -> bool:
        """Whether the keeper's thread lives."""
        return self.keeper._thread.is_alive()

    def retry_now(self) -> None:
        """The keeper's next round tries every directory that is not well."""
        for volume in self.volumes:
            volume.health._retry_at = 0.0

    def write_down(self) -> None:
        """Save what changes often, as the keeper does at the end of each round."""
        self.store._write_down()
