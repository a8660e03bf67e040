"""Rows of the index: what SQLite keeps of a run, checked when it comes back."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_hcache.core.keys import KEY_BYTES, NAMESPACE_ID_BYTES
from sglang_hcache.store.format.geometry import MAX_CHUNKS, MAX_SEGMENT, mask_of, members_of
from sglang_hcache.store.format.record import RUN_ID_BYTES

RUN_COLUMNS = "run, run_id, segment, namespace_id, first_chunk, members, rotation, keys, layer_bytes, offsets"

_MAX_COUNT = 2**62
"""Run numbers and logical times are smaller: there is room to count on from any of them."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the index keeps it."""

    number: int
    """Age: of two runs with the same key the one with the larger number counts."""
    run_id: bytes
    segment: int
    namespace_id: bytes
    first_chunk: int
    members: tuple[int, ...]
    rotation: int
    keys: tuple[bytes, ...]
    chunk_layer_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of the run's part in each directory's file, bytes."""


@dataclass(frozen=True, slots=True)
class Recency:
    """How dear a segment is (docs/store-format.md, "Eviction")."""

    last_used: int
    """Logical time, larger is more recent."""
    score: float


@dataclass(frozen=True, slots=True)
class IndexContents:
    """Everything an index holds."""

    runs: list[RunRow]
    """By number."""
    bad_rows: list[int]
    """Numbers of rows that make no sense."""
    recency: dict[int, Recency]
    """By segment."""
    quarantined: dict[int, dict[int, str]]
    """Run number -> chunk of the run -> why it is not served."""


def encode(row: RunRow) -> tuple[object, ...]:
    """Values for ``RUN_COLUMNS``."""
    return (
        row.number,
        row.run_id,
        row.segment,
        row.namespace_id,
        row.first_chunk,
        mask_of(row.members),
        row.rotation,
        b"".join(row.keys),
        struct.pack(f"<{len(row.chunk_layer_bytes)}I", *row.chunk_layer_bytes),
        struct.pack(f"<{len(row.offsets)}Q", *row.offsets),
    )


def decode(fields: Sequence[object], num_stripes: int) -> RunRow | None:
    """The row of ``fields``, in the order of ``RUN_COLUMNS``; None if they cannot be one."""
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
        or not layer_bytes
        or len(layer_bytes) % 4
        or len(offsets) != 8 * num_stripes
        or not 0 < mask < 1 << num_stripes
        or not 0 <= rotation < mask.bit_count()
        or not 0 <= segment <= MAX_SEGMENT
        or not 0 <= number < _MAX_COUNT
        or not 0 <= first_chunk < 2**32
    ):
        return None
    sizes = struct.unpack(f"<{len(layer_bytes) // 4}I", layer_bytes)
    if not all(sizes):
        return None
    return RunRow(
        number=number,
        run_id=run_id,
        segment=segment,
        namespace_id=namespace_id,
        first_chunk=first_chunk,
        members=members_of(mask),
        rotation=rotation,
        keys=tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
        chunk_layer_bytes=sizes,
        offsets=struct.unpack(f"<{num_stripes}Q", offsets),
    )


def decode_recency(rows: Iterable[Sequence[object]]) -> dict[int, Recency]:
    """Recency by segment from rows of ``segments``; those that make no sense are left out."""
    found = {}
    for segment, last_used, score in rows:
        if (
            isinstance(segment, int) and 0 <= segment <= MAX_SEGMENT
            and isinstance(last_used, int) and 0 <= last_used < _MAX_COUNT
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
