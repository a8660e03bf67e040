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


def erase(
    namespace_ids: Collection[bytes], volumes: Sequence[Volume], catalog: Catalog, remover: Remover
) -> Erased:
    """Nothing of these namespaces is left in any file afterwards; ``Space`` holds its lock, and nobody reads or writes.

    Raises:
        StoreError: something is left, in this directory or for this reason. Again, when that is mended.
    """
    for volume in volumes:
        if not volume.health.writable:
            raise StoreIOError(f"{volume.path} is {volume.health.condition}: {volume.health.reason}")
    before, runs = catalog.counts().chunks, 0

    def going_of(segment: Segment) -> list[StoredRun]:
        return [run for run in segment.runs if run.place.namespace_id in namespace_ids]

    remover.announce(segment.number for segment in catalog.segments())
    # First those of which no run goes: a write that failed may have left bytes between the runs of others.
    for segment in sorted(catalog.segments(), key=lambda item: bool(going_of(item))):
        going = going_of(segment)
        if len(going) == len(segment.runs):
            remover.retire(segment)
        else:
            kept = [run.place for run in segment.runs if run not in going]
            segment.keep_only(kept, [run.place for run in going])
            for run in going:
                catalog.drop_run(run)
            segment.trim()
        runs += len(going)
    left = sorted({segment.number for segment in remover.leftovers})
    if left:
        numbers = ", ".join(map(str, left))
        raise StoreIOError(f"all is erased but for files that cannot be deleted: segments {numbers}")
    for volume in volumes:
        volume.call(volume.directory.sync, "cannot make deletions last", writing=True)
    return Erased(before - catalog.counts().chunks, runs)
