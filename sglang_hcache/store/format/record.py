"""The 4096-byte header in front of every extent (docs/store-format.md, "Extent header"). Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.keys import KEY_BYTES
from sglang_hcache.store.format.geometry import (
    BLOCK,
    MAX_CHUNKS,
    MAX_LAYERS,
    MAX_SEGMENT,
    MAX_STRIPES,
    mask_of,
    members_of,
    shape_of,
)
from sglang_hcache.store.format.place import RunPlace

MAGIC = b"HCEXTENT"
FORMAT_VERSION = 5
"""Format of headers and directories together. Any change to stored bytes needs a new one."""

DIGEST_BYTES = 8

_FIXED = struct.Struct("<8sIIQ16s16sIIIIQHHH42x")
_DIGEST_AT = 16
_KEYS_AT = 128
_DIGESTS_AT = _KEYS_AT + MAX_CHUNKS * KEY_BYTES
_OFFSETS_AT = _DIGESTS_AT + MAX_CHUNKS * DIGEST_BYTES
_SIZES_AT = _OFFSETS_AT + MAX_STRIPES * 8
assert _FIXED.size == _KEYS_AT
assert _SIZES_AT + MAX_LAYERS * 4 == BLOCK

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """Everything an extent says about itself: its whole run, and which layer this is."""

    place: RunPlace
    layer: int
    digests: tuple[int, ...]
    """xxh3_64 of each chunk's payload in this layer."""

    @property
    def stripe(self) -> int:
        """Of the directory it lies in."""
        return self.place.shape.stripe(self.layer)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in this layer."""
        return self.place.shape.chunk_layer_bytes[self.layer]

    @property
    def begins_part(self) -> bool:
        """Whether it is the first one of its run in its directory."""
        return self.place.shape.layer_offsets[self.layer] == 0


def digest(data: Buffer) -> int:
    """xxh3_64 of ``data`` with seed 0."""
    return xxhash.xxh3_64_intdigest(data)


def pack_header(header: ExtentHeader) -> bytes:
    """The 4096 bytes of ``header``.

    Raises:
        ValueError: a field does not fit, or fields contradict each other.
    """
    place, shape = header.place, header.place.shape
    block = bytearray(BLOCK)
    try:
        _FIXED.pack_into(
            block, 0, MAGIC, FORMAT_VERSION, BLOCK, 0, place.namespace_id, place.run_id, header.layer,
            len(shape.chunk_layer_bytes), place.first_chunk, shape.num_chunks, place.segment, shape.num_stripes,
            shape.rotation, mask_of(shape.members),
        )  # fmt: skip
        digests = struct.pack(f"<{shape.num_chunks}Q", *header.digests)
        layer_bytes = struct.pack(f"<{len(shape.chunk_layer_bytes)}I", *shape.chunk_layer_bytes)
        offsets = struct.pack(f"<{shape.num_stripes}Q", *place.offsets)
    except struct.error as error:
        raise ValueError(f"a header field does not fit: {error}") from None
    for at, limit, data in (
        (_KEYS_AT, _DIGESTS_AT, b"".join(place.keys)),
        (_DIGESTS_AT, _OFFSETS_AT, digests),
        (_OFFSETS_AT, _SIZES_AT, offsets),
        (_SIZES_AT, BLOCK, layer_bytes),
    ):
        if at + len(data) > limit:
            raise ValueError("header fields are too many")
        block[at : at + len(data)] = data
    if _header_in(block) != header:
        raise ValueError("header fields contradict each other")
    struct.pack_into("<Q", block, _DIGEST_AT, digest(block))
    return bytes(block)


def parse_header(block: Buffer) -> ExtentHeader:
    """Read back what :func:`pack_header` wrote from 4096 bytes.

    Raises:
        CorruptExtentError: wrong magic, version or digest, or fields that contradict each other.
    """
    if len(block) != BLOCK:
        raise CorruptExtentError(f"header has {len(block)} of {BLOCK} bytes")
    if bytes(block[: len(MAGIC)]) != MAGIC:
        raise CorruptExtentError(f"header has wrong magic {bytes(block[:8])!r}")
    _, version, header_bytes, stored_digest = _FIXED.unpack_from(block)[:4]
    if version != FORMAT_VERSION or header_bytes != BLOCK:
        raise CorruptExtentError(f"header has format version {version}, expected {FORMAT_VERSION}")
    zeroed = bytearray(block)
    zeroed[_DIGEST_AT : _DIGEST_AT + DIGEST_BYTES] = bytes(DIGEST_BYTES)
    if digest(zeroed) != stored_digest:
        raise CorruptExtentError("header digest does not match")
    header = _header_in(zeroed)
    if header is None:
        raise CorruptExtentError("header fields contradict each other")
    return header


def _header_in(block: Buffer) -> ExtentHeader | None:
    """What the fields of a header say; None if they cannot be true together."""
    (*_, namespace_id, run_id, layer, num_layers, first_chunk,
     num_chunks, segment, num_stripes, rotation, mask) = _FIXED.unpack_from(block)  # fmt: skip
    if (
        not 0 < num_chunks <= MAX_CHUNKS
        or not layer < num_layers <= MAX_LAYERS
        or not 0 < num_stripes <= MAX_STRIPES
        or not 0 < mask < 1 << num_stripes
        or not rotation < mask.bit_count()
        or not segment <= MAX_SEGMENT
    ):
        return None
    sizes = struct.unpack_from(f"<{num_layers}I", block, _SIZES_AT)
    if not all(sizes):
        return None
    place = RunPlace(
        run_id=run_id,
        namespace_id=_shared(namespace_id),
        keys=tuple(
            bytes(block[at : at + KEY_BYTES])
            for at in range(_KEYS_AT, _KEYS_AT + num_chunks * KEY_BYTES, KEY_BYTES)
        ),
        first_chunk=first_chunk,
        shape=shape_of(num_chunks, sizes, num_stripes, members_of(mask), rotation),
        segment=segment,
        offsets=struct.unpack_from(f"<{num_stripes}Q", block, _OFFSETS_AT),
    )
    return ExtentHeader(place, layer, struct.unpack_from(f"<{num_chunks}Q", block, _DIGESTS_AT))


@lru_cache(4096)
def _shared(namespace_id: bytes) -> bytes:
    """One object for each namespace, as :func:`shape_of` for each geometry."""
    return namespace_id


def check_header(header: ExtentHeader, place: RunPlace, layer: int) -> None:
    """
    Raises:
        CorruptExtentError: what was read is not of this layer of this run.
    """
    if (header.place, header.layer) != (place, layer):
        found = header.place
        raise CorruptExtentError(
            f"header is another one: of layer {header.layer} of run {found.run_id.hex()} in segment {found.segment}"
        )


def bad_chunks(header: ExtentHeader, payloads: Sequence[Buffer], start: int) -> list[int]:
    """Which of chunks ``start``, ``start + 1``, ... of the run have other bytes in ``payloads`` than were written."""
    return [index for index, data in enumerate(payloads, start) if digest(data) != header.digests[index]]
