"""Where a run lies on disk, and what it is: what each of its headers says."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hcache.store.format.geometry import RunShape

RUN_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What is needed to find and check a run's bytes."""

    run_id: bytes
    namespace_id: bytes
    keys: tuple[bytes, ...]
    first_chunk: int
    shape: RunShape
    segment: int
    offsets: tuple[int, ...]
    """Where the run's part begins in each directory's file, bytes; one entry a directory of the store."""

    def __hash__(self) -> int:
        return hash(self.run_id)  # else a start spends much of its time here

    def extent_offset(self, layer: int) -> int:
        """Byte at which the header of ``layer`` lies in its file."""
        return self.offsets[self.shape.stripe(layer)] + self.shape.layer_offsets[layer]

    @property
    def age(self) -> int:
        """Grows with each run of a segment."""
        return sum(self.offsets)

    def end(self, stripe: int) -> int:
        """Byte behind the run's part in the file of directory ``stripe``."""
        return self.offsets[stripe] + self.shape.part_bytes[stripe]

    @property
    def ends(self) -> tuple[int, ...]:
        """Byte behind the run's part in each directory's file; 0 where it has none."""
        pairs = zip(self.offsets, self.shape.part_bytes, strict=True)
        return tuple(offset + size if size else 0 for offset, size in pairs)
