"""Finding runs by their headers, for when the index is lost (docs/store-format.md, "Rebuilding").

Reads one header an extent and no payload, so the time depends on the number of extents; payloads are
verified when they are read. Buffered I/O on purpose: this must work whatever O_DIRECT does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.directory import StoreDirectory
from sglang_hcache.store.geometry import BLOCK, ShapeTable
from sglang_hcache.store.index import RunRow
from sglang_hcache.store.record import MAGIC, ExtentHeader, parse_header

_WINDOW_BYTES = 2**20
"""Read at once while looking for the next header after damage."""

Part = tuple[ExtentHeader, ...]
"""The headers of all extents of a run in one directory, in order."""


def scan_segment(number: int, directories: Sequence[StoreDirectory], shapes: ShapeTable) -> list[RunRow]:
    """The complete runs of segment ``number``, in file order. Files that cannot be read hold none."""
    parts: dict[bytes, dict[int, Part]] = {}
    for directory in directories:
        try:
            fd = os.open(directory.segment_path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            for part in _scan_file(fd, number, directory.stripe, len(directories)):
                parts.setdefault(part[0].run_id, {})[directory.stripe] = part
        except OSError:
            continue
        finally:
            os.close(fd)
    rows = (_join(found, shapes, len(directories)) for found in parts.values())
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


def _walk_part(fd: int, first: ExtentHeader) -> Part:
    """All headers of the part that ``first`` begins; empty if one is missing or out of place."""
    headers = [first]
    at = first.extent_bytes
    while at < first.part_bytes:
        header = _header_at(fd, first.part_offset + at)
        if header is None or header != _successor(first, header, at):
            return ()
        headers.append(header)
        at += header.extent_bytes
    return tuple(headers) if at == first.part_bytes else ()


def _successor(first: ExtentHeader, header: ExtentHeader, at: int) -> ExtentHeader:
    """What ``header`` must be equal to: like ``first`` but for what changes from layer to layer."""
    return replace(
        first, layer=header.layer, chunk_bytes=header.chunk_bytes, digests=header.digests, extent_offset=at
    )


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


def _join(parts: dict[int, Part], shapes: ShapeTable, num_stripes: int) -> RunRow | None:
    """A run from its parts; None unless every layer is there and where it belongs."""
    layers = {header.layer: header for part in parts.values() for header in part}
    first = next(iter(layers.values()))
    if sorted(layers) != list(range(first.num_layers)):
        return None
    row = RunRow(
        run_id=first.run_id,
        segment=first.segment,
        namespace_id=first.namespace_id,
        first_chunk=first.first_chunk,
        rotation=first.rotation,
        keys=first.keys,
        chunk_layer_bytes=tuple(layers[layer].chunk_bytes for layer in range(first.num_layers)),
        offsets=tuple(
            parts[stripe][0].part_offset if stripe in parts else 0 for stripe in range(num_stripes)
        ),
    )
    shape = shapes.get(len(row.keys), row.chunk_layer_bytes, row.rotation)
    for layer, header in layers.items():
        stripe = shape.stripe(layer)
        same_run = (header.keys, header.namespace_id, header.first_chunk, header.num_layers)
        place = (header.stripe, header.extent_offset, header.part_bytes)
        if same_run != (row.keys, row.namespace_id, row.first_chunk, first.num_layers):
            return None
        if place != (stripe, shape.layer_offsets[layer], shape.part_bytes[stripe]):
            return None
    return row
