"""The 4096-byte header in front of every extent (docs/store-format.md, "Extent header"). Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.keys import KEY_BYTES
from sglang_hcache.store.format.geometry import BLOCK, MAX_CHUNKS, MAX_LAYERS, MAX_STRIPES
from sglang_hcache.store.format.rows import RunPlace, decode, encode

MAGIC = b"HCEXTENT"
FORMAT_VERSION = 3
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
    """Everything an extent says about itself: its whole run, as in the index, and which layer this is."""

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
        ValueError: a field does not fit, or keys and digests do not pair up.
    """
    place, shape = header.place, header.place.shape
    try:
        row = encode(0, place)
        _, run_id, segment, namespace_id, first_chunk, mask, rotation, keys, layer_bytes, offsets = row
        fixed = _FIXED.pack(
            MAGIC, FORMAT_VERSION, BLOCK, 0, namespace_id, run_id, header.layer, len(shape.chunk_layer_bytes),
            first_chunk, shape.num_chunks, segment, shape.num_stripes, rotation, mask,
        )  # fmt: skip
        digests = struct.pack(f"<{shape.num_chunks}Q", *header.digests)
    except struct.error as error:
        raise ValueError(f"a header field does not fit: {error}") from None
    if decode(row, shape.num_stripes) != place or not header.layer < len(shape.chunk_layer_bytes):
        raise ValueError("header fields contradict each other")
    block = bytearray(BLOCK)
    for at, data in ((0, fixed), (_KEYS_AT, keys), (_DIGESTS_AT, digests), (_OFFSETS_AT, offsets)):
        block[at : at + len(data)] = data
    block[_SIZES_AT : _SIZES_AT + len(layer_bytes)] = layer_bytes
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
    (_, version, header_bytes, stored_digest, namespace_id, run_id, layer, num_layers, first_chunk,
     num_chunks, segment, num_stripes, rotation, mask) = _FIXED.unpack_from(block)  # fmt: skip
    if version != FORMAT_VERSION or header_bytes != BLOCK:
        raise CorruptExtentError(f"header has format version {version}, expected {FORMAT_VERSION}")
    zeroed = bytearray(block)
    zeroed[_DIGEST_AT : _DIGEST_AT + DIGEST_BYTES] = bytes(DIGEST_BYTES)
    if digest(zeroed) != stored_digest:
        raise CorruptExtentError("header digest does not match")
    place = decode(
        (
            *(0, run_id, segment, namespace_id, first_chunk, mask, rotation),
            bytes(block[_KEYS_AT:_DIGESTS_AT][: num_chunks * KEY_BYTES]),
            bytes(block[_SIZES_AT:][: num_layers * 4]),
            bytes(block[_OFFSETS_AT:_SIZES_AT][: num_stripes * 8]),
        ),
        num_stripes,
    )
    if place is None or (place.shape.num_chunks, len(place.shape.chunk_layer_bytes)) != (
        num_chunks,
        num_layers,
    ):
        raise CorruptExtentError("header fields contradict each other")
    if not layer < num_layers:
        raise CorruptExtentError(f"header says layer {layer} of {num_layers}")
    return ExtentHeader(place, layer, struct.unpack_from(f"<{num_chunks}Q", block, _DIGESTS_AT))


def check_header(header: ExtentHeader, place: RunPlace, layer: int) -> None:
    """Compare what was read with what the index promised.

    Raises:
        CorruptExtentError: names the first field that differs.
    """
    if (header.place, header.layer) != (place, layer):
        pairs = zip(_identity(header.place, header.layer), _identity(place, layer), strict=True)
        name, found, wanted = next(
            (name, found, wanted) for (name, found), (_, wanted) in pairs if found != wanted
        )
        raise CorruptExtentError(f"extent has {name} {_show(found)}, expected {_show(wanted)}")


def _identity(place: RunPlace, layer: int) -> list[tuple[str, object]]:
    shape = place.shape
    return [
        ("namespace_id", place.namespace_id), ("keys", place.keys), ("layer", layer),
        ("chunk_layer_bytes", shape.chunk_layer_bytes), ("first_chunk", place.first_chunk), ("run_id", place.run_id),
        ("num_stripes", shape.num_stripes), ("members", shape.members), ("rotation", shape.rotation),
        ("segment", place.segment), ("offsets", place.offsets),
    ]  # fmt: skip


def _show(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], bytes):
        return f"[{len(value)} keys, first {value[0].hex()[:12]}]"
    return value.hex() if isinstance(value, bytes) else str(value)


def bad_chunks(header: ExtentHeader, payloads: Sequence[Buffer], start: int) -> list[int]:
    """Which of chunks ``start``, ``start + 1``, ... of the run have other bytes in ``payloads`` than were written."""
    return [index for index, data in enumerate(payloads, start) if digest(data) != header.digests[index]]
