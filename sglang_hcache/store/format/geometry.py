"""Where the bytes of a run lie: blocks, extents and parts (docs/store-format.md, "Runs, extents, parts")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

BLOCK = 4096
"""Alignment of everything on disk, and the size of an extent's header, bytes."""

MAX_CHUNKS = 64
"""Chunks in a run at most: what fits a header."""

MAX_STRIPES = 16
"""Directories of a store at most: bits of the member mask, and what fits a header."""

MAX_LAYERS = 320
"""Layers of a run at most: what fits a header."""

MAX_SEGMENT = 10**15 - 1
"""Largest number of a segment: what a file's name has room for."""


def round_up(count: int) -> int:
    """``count`` bytes up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def extent_bytes(num_chunks: int, chunk_bytes: int) -> int:
    """Header block and padded payload of one layer of a run, bytes."""
    return BLOCK + round_up(num_chunks * chunk_bytes)


@dataclass(frozen=True, slots=True)
class RunShape:
    """The geometry of a run: pure arithmetic on what it is made of. Use :func:`shape_of`."""

    num_chunks: int
    chunk_layer_bytes: tuple[int, ...]
    """Bytes of one chunk in each layer."""
    num_stripes: int
    """Directories of the store."""
    members: tuple[int, ...]
    """Directories that hold the run, counted from 0, ascending: those that took writes when it was written."""
    rotation: int
    """Layer ``l`` lies in directory ``members[(l + rotation) % len(members)]``."""
    layer_offsets: tuple[int, ...] = field(init=False, repr=False)
    """Where each layer's extent begins inside its part, bytes."""
    part_bytes: tuple[int, ...] = field(init=False, repr=False)
    """Bytes the run takes in each directory's file, 0 where it has no layer; one entry a directory of the store."""

    def __post_init__(self) -> None:
        parts = [0] * self.num_stripes
        offsets = []
        for layer, chunk_bytes in enumerate(self.chunk_layer_bytes):
            stripe = self.stripe(layer)
            offsets.append(parts[stripe])
            parts[stripe] += extent_bytes(self.num_chunks, chunk_bytes)
        object.__setattr__(self, "layer_offsets", tuple(offsets))
        object.__setattr__(self, "part_bytes", tuple(parts))

    def stripe(self, layer: int) -> int:
        """Directory of ``layer``, counted from 0."""
        return self.members[(layer + self.rotation) % len(self.members)]

    @property
    def disk_bytes(self) -> int:
        """Bytes of all extents, headers and padding included."""
        return sum(self.part_bytes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all chunks in all layers, without headers and padding."""
        return self.num_chunks * sum(self.chunk_layer_bytes)


def mask_of(stripes: Iterable[int]) -> int:
    """``stripes`` as bits: bit 0 for directory 0."""
    return sum(1 << stripe for stripe in stripes)


@lru_cache(1024)
def members_of(mask: int) -> tuple[int, ...]:
    """The inverse of :func:`mask_of`, ascending."""
    return tuple(stripe for stripe in range(mask.bit_length()) if mask >> stripe & 1)


@lru_cache(4096)
def shape_of(
    num_chunks: int,
    chunk_layer_bytes: tuple[int, ...],
    num_stripes: int,
    members: tuple[int, ...],
    rotation: int,
) -> RunShape:
    """One object for each geometry, so that a million runs share a few. Safe from several threads."""
    return RunShape(num_chunks, chunk_layer_bytes, num_stripes, members, rotation)
