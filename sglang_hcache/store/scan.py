"""Finding runs by their headers, for when the index is lost (docs/store-format.md, "Rebuilding").

Reads a header a part, looks at the beginning of every other one and at no payload, so the time depends on the
number of extents; everything is verified when it is read. Buffered I/O on purpose: this must work whatever
O_DIRECT does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.format.geometry import BLOCK, ShapeTable, extent_bytes
from sglang_hcache.store.format.record import MAGIC, PEEK_BYTES, ExtentHeader, parse_header, peek_extent
from sglang_hcache.store.format.rows import RunRow
from sglang_hcache.store.volumes.directory import StoreDirectory

_SCAN_THREADS = 8
_WINDOW_BYTES = 2**20
"""Read at once while looking for the next header after damage."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one directory holds of a run."""

    first: ExtentHeader
    extents: tuple[tuple[int, int, int], ...]
    """Layer, chunk bytes and offset inside the part, of each extent in order."""


def scan_segments(
    numbers: Sequence[int], directories: Mapping[int, StoreDirectory], num_stripes: int
) -> Iterator[list[RunRow]]:
    """The complete runs of each segment, in the order of ``numbers``, without their own numbers (0).

    Reads several segments at a time: what takes long is waiting for the device.

    Args:
        directories: those that can be read, by stripe.
    """
    shapes = ShapeTable(num_stripes)
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="hcache-scan") as pool:
        yield from pool.map(lambda number: scan_segment(number, directories, shapes), numbers)


def scan_segment(number: int, directories: Mapping[int, StoreDirectory], shapes: ShapeTable) -> list[RunRow]:
    """The complete runs of segment ``number``, in file order. Files that cannot be read hold none."""
    parts: dict[bytes, dict[int, Part]] = {}
    for stripe, directory in directories.items():
        try:
            fd = os.open(directory.segment_path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            for part in _scan_file(fd, number, stripe, shapes.num_stripes):
                parts.setdefault(part.first.run_id, {})[stripe] = part
        except OSError:
            continue
        finally:
            os.close(fd)
    rows = (_join(found, shapes) for found in parts.values())
    return sorted((row for row in rows if row is not None), key=lambda row: max(row.offsets))


def _scan_file(fd: int, number: int, stripe: int, num_stripes: int) -> Iterator[Part]:
    size = os.fstat(fd).st_size
    at = 0
    while at + BLOCK <= size:
        first = _header_at(fd, at)
        in_place = first is not None and (
            (first.segment, first.stripe, first.num_stripes, first.part_offset, first.extent_offset)
            == (number, stripe, num_stripes, at, 0)
        )
        if first is None or not in_place or first.part_bytes < first.extent_bytes:
            at = _next_candidate(fd, at + BLOCK, size)
            continue
        part = _walk_part(fd, first)
        if part:
            yield part
            at += first.part_bytes
        else:
            at += first.extent_bytes


def _walk_part(fd: int, first: ExtentHeader) -> Part | None:
    """The part that ``first`` begins; None if an extent is missing or out of place."""
    extents = [(first.layer, first.chunk_bytes, 0)]
    at = first.extent_bytes
    while at < first.part_bytes:
        found = peek_extent(os.pread(fd, PEEK_BYTES, first.part_offset + at), first)
        if found is None or found[2] != at:
            return None
        extents.append(found)
        at += extent_bytes(first.num_chunks, found[1])
    return Part(first, tuple(extents)) if at == first.part_bytes else None


def _header_at(fd: int, offset: int) -> ExtentHeader | None:
    try:
        return parse_header(os.pread(fd, BLOCK, offset))
    except CorruptExtentError:
        return None


def _next_candidate(fd: int, at: int, size: int) -> int:
    """The next block from ``at`` on that begins like a header, or ``size``. Skips holes."""
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
        except OSError:  # ENXIO: no data behind here
            return size
        window = os.pread(fd, _WINDOW_BYTES, at)
        for offset in range(0, len(window), BLOCK):
            if window.startswith(MAGIC, offset):
                return at + offset
        at += max(len(window), BLOCK)
    return size


def _join(parts: dict[int, Part], shapes: ShapeTable) -> RunRow | None:
    """A run from its parts; None unless every layer is there and where it belongs."""
    first = next(iter(parts.values())).first
    layers = {
        layer: (stripe, offset, chunk_bytes)
        for stripe, part in parts.items()
        for layer, chunk_bytes, offset in part.extents
    }
    if len(layers) != first.num_layers or sorted(layers) != list(range(len(layers))):
        return None
    sizes = tuple(layers[layer][2] for layer in range(first.num_layers))
    shape = shapes.get(first.num_chunks, sizes, first.members, first.rotation)
    for stripe, part in parts.items():
        if not _same_run(part.first, first) or part.first.part_bytes != shape.part_bytes[stripe]:
            return None
    for layer, (stripe, offset, _) in layers.items():
        if (stripe, offset) != (shape.stripe(layer), shape.layer_offsets[layer]):
            return None
    return RunRow(
        number=0,
        run_id=first.run_id,
        segment=first.segment,
        namespace_id=first.namespace_id,
        first_chunk=first.first_chunk,
        members=first.members,
        rotation=first.rotation,
        keys=first.keys,
        chunk_layer_bytes=sizes,
        offsets=tuple(
            parts[stripe].first.part_offset if stripe in parts else 0 for stripe in range(shapes.num_stripes)
        ),
    )


def _same_run(header: ExtentHeader, other: ExtentHeader) -> bool:
    return all(
        getattr(header, name) == getattr(other, name)
        for name in ("keys", "namespace_id", "first_chunk", "num_layers", "members", "rotation")
    )
