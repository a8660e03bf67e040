"""Erasing namespaces: their bytes leave the segments that they share with others (docs/store-format.md, "Erasing")."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.store.volumes.volume import Volume


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure removed."""

    chunks: int
    """That were served until then."""
    runs: int


class Eraser:
    """Not thread-safe: ``Space`` holds its lock, and nothing is written or read meanwhile."""

    def __init__(self, volumes: Sequence[Volume], catalog: Catalog, remover: Remover) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._remover = remover

    def erase(self, namespace_ids: Collection[bytes]) -> Erased:
        """Nothing of these namespaces is left in any file afterwards.

        Raises:
            StoreError: something is left, in this directory or for this reason. Again, when that is mended.
        """
        self._refuse_if_incomplete()
        before, runs = self._catalog.counts().chunks, 0

        def going_of(segment: Segment) -> list[StoredRun]:
            return [run for run in segment.runs if run.place.namespace_id in namespace_ids]

        self._remover.announce(segment.number for segment in self._catalog.segments())
        # First those of which no run goes: a write that failed may have left bytes between the runs of others.
        for segment in sorted(self._catalog.segments(), key=lambda item: bool(going_of(item))):
            going = going_of(segment)
            if len(going) == len(segment.runs):
                self._remover.retire(segment, only_unpinned=False)
            else:
                kept = [run.place for run in segment.runs if run not in going]
                segment.keep_only(kept, [run.place for run in going])
                for run in going:
                    self._catalog.drop_run(run)
                segment.trim()
            runs += len(going)
        left = sorted(segment.number for segment in self._remover.leftovers)
        if left:
            numbers = ", ".join(map(str, left))
            raise StoreIOError(f"all is erased but for files that cannot be deleted: segments {numbers}")
        for volume in self._volumes:
            volume.sync()
        return Erased(before - self._catalog.counts().chunks, runs)

    def _refuse_if_incomplete(self) -> None:
        """Raises StoreIOError: not all that is stored can be seen and changed."""
        for volume in self._volumes:
            if not volume.health.writable:
                raise StoreIOError(f"{volume.path} is {volume.health.condition}: {volume.health.reason}")
