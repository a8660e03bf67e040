"""A run as it lies on disk, and as a row of the index or a header, checked when it comes back from there."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hcache.core.keys import KEY_BYTES, NAMESPACE_ID_BYTES
from sglang_hcache.store.format.geometry import (
    MAX_CHUNKS,
    MAX_LAYERS,
    MAX_SEGMENT,
    MAX_STRIPES,
    RunShape,
    mask_of,
    members_of,
    shape_of,
)

RUN_ID_BYTES = 16

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (segment INTEGER PRIMARY KEY, last_used INTEGER NOT NULL, score REAL NOT NULL);
CREATE TABLE runs (
    run INTEGER PRIMARY KEY,
    run_id BLOB NOT NULL,
    segment INTEGER NOT NULL,
    namespace_id BLOB NOT NULL,
    first_chunk INTEGER NOT NULL,
    members INTEGER NOT NULL,
    rotation INTEGER NOT NULL,
    keys BLOB NOT NULL,
    layer_bytes BLOB NOT NULL,
    offsets BLOB NOT NULL
);
CREATE TABLE quarantine (
    run INTEGER NOT NULL, chunk INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (run, chunk)
) WITHOUT ROWID;
"""

RUN_COLUMNS = "run, run_id, segment, namespace_id, first_chunk, members, rotation, keys, layer_bytes, offsets"

Row = tuple[int, bytes, int, bytes, int, int, int, bytes, bytes, bytes]
"""Values of ``RUN_COLUMNS``."""

MAX_COUNT = 2**62
"""Run numbers and logical times are smaller: there is room to count on from any of them."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What is needed to find and check a run's bytes: what the index keeps of it, and each of its headers says."""

    run_id: bytes
    namespace_id: bytes
    keys: tuple[bytes, ...]
    first_chunk: int
    shape: RunShape
    segment: int
    offsets: tuple[int, ...]
    """Where the run's part begins in each directory's file, bytes; one entry a directory of the store."""

    def extent_offset(self, layer: int) -> int:
        """Byte at which the header of ``layer`` lies in its file."""
        return self.offsets[self.shape.stripe(layer)] + self.shape.layer_offsets[layer]

    @property
    def ends(self) -> tuple[int, ...]:
        """Byte behind the run's part in each directory's file; 0 where it has none."""
        pairs = zip(self.offsets, self.shape.part_bytes, strict=True)
        return tuple(offset + size if size else 0 for offset, size in pairs)


@dataclass(frozen=True, slots=True)
class Recency:
    """Last use and score of a segment (docs/store-format.md, "Eviction")."""

    last_used: int
    """Logical time, larger is more recent."""
    score: float


@dataclass(frozen=True, slots=True)
class IndexContents:
    """Everything an index holds."""

    runs: dict[int, RunPlace]
    """By number, ascending. Of two runs with the same key that in the later segment counts, then the larger number."""
    bad_rows: list[int]
    """Numbers of rows that make no sense."""
    recency: dict[int, Recency]
    """By segment."""
    quarantined: dict[int, dict[int, str]]
    """Run number -> chunk of the run -> why it is not served."""


def encode(number: int, place: RunPlace) -> Row:
    """Values for ``RUN_COLUMNS``."""
    sizes = place.shape.chunk_layer_bytes
    return (
        number,
        place.run_id,
        place.segment,
        place.namespace_id,
        place.first_chunk,
        mask_of(place.shape.members),
        place.shape.rotation,
        b"".join(place.keys),
        struct.pack(f"<{len(sizes)}I", *sizes),
        struct.pack(f"<{len(place.offsets)}Q", *place.offsets),
    )


def decode(fields: Sequence[object], num_stripes: int) -> RunPlace | None:
    """The run of ``fields``, in the order of ``RUN_COLUMNS``, in so many directories; None if they cannot be one."""
    number, run_id, segment, namespace_id, first_chunk, mask, rotation, keys, layer_bytes, offsets = fields
    if not (
        isinstance(segment, int) and isinstance(first_chunk, int) and isinstance(rotation, int)
        and isinstance(number, int) and isinstance(mask, int)
        and isinstance(run_id, bytes) and isinstance(namespace_id, bytes)
        and isinstance(keys, bytes) and isinstance(layer_bytes, bytes) and isinstance(offsets, bytes)
    ):  # fmt: skip
        return None
    if (
        len(run_id) != RUN_ID_BYTES
        or len(namespace_id) != NAMESPACE_ID_BYTES
        or len(keys) % KEY_BYTES
        or not 0 < len(keys) <= MAX_CHUNKS * KEY_BYTES
        or len(layer_bytes) % 4
        or not 0 < len(layer_bytes) <= MAX_LAYERS * 4
        or not 0 < num_stripes <= MAX_STRIPES
        or len(offsets) != 8 * num_stripes
        or not 0 < mask < 1 << num_stripes
        or not 0 <= rotation < mask.bit_count()
        or not 0 <= segment <= MAX_SEGMENT
        or not 0 <= number < MAX_COUNT
        or not 0 <= first_chunk < 2**32
    ):
        return None
    sizes = struct.unpack(f"<{len(layer_bytes) // 4}I", layer_bytes)
    if not all(sizes):
        return None
    return RunPlace(
        run_id=run_id,
        namespace_id=namespace_id,
        keys=tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
        first_chunk=first_chunk,
        shape=shape_of(len(keys) // KEY_BYTES, sizes, num_stripes, members_of(mask), rotation),
        segment=segment,
        offsets=struct.unpack(f"<{num_stripes}Q", offsets),
    )


def decode_recency(rows: Iterable[Sequence[object]]) -> dict[int, Recency]:
    """Recency by segment from rows of ``segments``; those that make no sense are left out."""
    found = {}
    for segment, last_used, score in rows:
        if (
            isinstance(segment, int) and 0 <= segment <= MAX_SEGMENT
            and isinstance(last_used, int) and 0 <= last_used < MAX_COUNT
            and isinstance(score, float) and 0 <= score < math.inf
        ):  # fmt: skip
            found[segment] = Recency(last_used, score)
    return found


def decode_quarantine(rows: Iterable[Sequence[object]]) -> dict[int, dict[int, str]]:
    """Run number -> chunk -> reason, from rows of ``quarantine``; those that make no sense are left out."""
    found: dict[int, dict[int, str]] = {}
    for run, chunk, reason in rows:
        if isinstance(run, int) and isinstance(chunk, int) and 0 <= chunk < MAX_CHUNKS:
            found.setdefault(run, {})[chunk] = str(reason)
    return found
