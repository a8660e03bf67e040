"""Where rows that are written directly, in the middle of a forward pass, belong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import CHUNK_TOKENS, StateLayout


@dataclass(frozen=True)
class Place:
    """Rows [first, first + count) of a pass go to byte ``offset`` of their request's file."""

    first: int
    count: int
    offset: int


def places(rows: RequestRows, layout: StateLayout, layer: int) -> Iterator[Place]:
    """Where one layer's rows of a request belong: chunk after chunk, layer-major inside each."""
    done = 0
    while done < rows.count:
        chunk, row = divmod(rows.position + done, CHUNK_TOKENS)
        count = min(CHUNK_TOKENS - row, rows.count - done)
        offset = chunk * layout.chunk_bytes + layout.layer_offset(layer) + row * layout.row_bytes[layer]
        yield Place(rows.row + done, count, offset)
        done += count
