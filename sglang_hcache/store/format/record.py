"""The 4096-byte header in front of every extent (docs/store-format.md, "Extent header"). Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.core.keys import KEY_BYTES, NAMESPACE_ID_BYTES
from sglang_hcache.store.format.geometry import BLOCK, MAX_CHUNKS, extent_bytes, mask_of, members_of

MAGIC = b"HCEXTENT"
FORMAT_VERSION = 2
"""Format of headers and directories together. Any change to stored bytes needs a new one."""

RUN_ID_BYTES = 16
DIGEST_BYTES = 8

_FIXED = struct.Struct("<8sIIQ16s16sIIIIQQHHHHQQQQ")
_DIGEST_AT = 16
_KEYS_AT = 128
_DIGESTS_AT = _KEYS_AT + MAX_CHUNKS * KEY_BYTES
_END = _DIGESTS_AT + MAX_CHUNKS * DIGEST_BYTES
assert _FIXED.size == _KEYS_AT

PEEK_BYTES = _FIXED.size
"""Bytes of a header without keys and digests."""
_PEEKED = struct.Struct("<16s8x32sI8sIQQ32sQ")
"""The same bytes, without the digest: what extents of a part have in common in a few pieces, and the rest."""
assert _PEEKED.size == PEEK_BYTES
assert _END <= BLOCK

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """Everything an extent says about itself. Field widths: docs/store-format.md."""

    namespace_id: bytes
    run_id: bytes
    layer: int
    num_layers: int
    first_chunk: int
    """Position of the first chunk's first token, divided by 64."""
    chunk_bytes: int
    """Bytes of one chunk in this layer."""
    stripe: int
    num_stripes: int
    members: tuple[int, ...]
    """Directories that hold the run, ascending."""
    rotation: int
    segment: int
    part_offset: int
    """Where the run's part begins in this file, bytes."""
    part_bytes: int
    extent_offset: int
    """Where this extent begins inside the part, bytes."""
    keys: tuple[bytes, ...]
    digests: tuple[int, ...]
    """xxh3_64 of each chunk's payload in this layer."""

    @property
    def num_chunks(self) -> int:
        return len(self.keys)

    @property
    def payload_bytes(self) -> int:
        """Without padding."""
        return self.num_chunks * self.chunk_bytes

    @property
    def extent_bytes(self) -> int:
        """Header, payload and padding."""
        return extent_bytes(self.num_chunks, self.chunk_bytes)


def digest(data: Buffer) -> int:
    """xxh3_64 of ``data`` with seed 0."""
    return xxhash.xxh3_64_intdigest(data)


def pack_header(header: ExtentHeader) -> bytes:
    """The 4096 bytes of ``header``.

    Raises:
        ValueError: a field does not fit, or keys and digests do not pair up.
    """
    if not 1 <= header.num_chunks <= MAX_CHUNKS or len(header.digests) != header.num_chunks:
        raise ValueError(f"{header.num_chunks} keys and {len(header.digests)} digests in one header")
    if any(len(key) != KEY_BYTES for key in header.keys):
        raise ValueError(f"a chunk key has {KEY_BYTES} bytes")
    if len(header.namespace_id) != NAMESPACE_ID_BYTES or len(header.run_id) != RUN_ID_BYTES:
        raise ValueError("namespace id and run id have 16 bytes")
    block = bytearray(BLOCK)
    try:
        _FIXED.pack_into(
            block, 0, MAGIC, FORMAT_VERSION, BLOCK, 0, header.namespace_id, header.run_id,
            header.layer, header.num_layers, header.first_chunk, header.num_chunks,
            header.chunk_bytes, header.payload_bytes,
            header.stripe, header.num_stripes, header.rotation, mask_of(header.members),
            header.segment, header.part_offset, header.part_bytes, header.extent_offset,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a header field does not fit: {error}") from None
    block[_KEYS_AT : _KEYS_AT + header.num_chunks * KEY_BYTES] = b"".join(header.keys)
    struct.pack_into(f"<{header.num_chunks}Q", block, _DIGESTS_AT, *header.digests)
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
    fields = _FIXED.unpack_from(block)
    (_, version, header_bytes, stored_digest, namespace_id, run_id, layer, num_layers, first_chunk,
     num_chunks, chunk_bytes, payload_bytes, stripe, num_stripes, rotation, member_mask,
     segment, part_offset, part_bytes, extent_offset) = fields  # fmt: skip
    if version != FORMAT_VERSION or header_bytes != BLOCK:
        raise CorruptExtentError(f"header has format version {version}, expected {FORMAT_VERSION}")
    zeroed = bytearray(block)
    zeroed[_DIGEST_AT : _DIGEST_AT + DIGEST_BYTES] = bytes(DIGEST_BYTES)
    if digest(zeroed) != stored_digest:
        raise CorruptExtentError("header digest does not match")
    if not 1 <= num_chunks <= MAX_CHUNKS or payload_bytes != num_chunks * chunk_bytes:
        raise CorruptExtentError(f"header says {payload_bytes} bytes for {num_chunks} chunks")
    members = members_of(member_mask)
    in_range = layer < num_layers and rotation < len(members) and members[-1] < num_stripes
    if not in_range or stripe not in members:
        raise CorruptExtentError("header fields contradict each other")
    if part_offset % BLOCK or part_bytes % BLOCK or extent_offset % BLOCK:
        raise CorruptExtentError("header offsets are not multiples of 4096")
    keys = bytes(block[_KEYS_AT : _KEYS_AT + num_chunks * KEY_BYTES])
    return ExtentHeader(
        namespace_id=namespace_id,
        run_id=run_id,
        layer=layer,
        num_layers=num_layers,
        first_chunk=first_chunk,
        chunk_bytes=chunk_bytes,
        stripe=stripe,
        num_stripes=num_stripes,
        members=members,
        rotation=rotation,
        segment=segment,
        part_offset=part_offset,
        part_bytes=part_bytes,
        extent_offset=extent_offset,
        keys=tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
        digests=struct.unpack_from(f"<{num_chunks}Q", block, _DIGESTS_AT),
    )


def peek_extent(block: Buffer, first: Buffer) -> tuple[int, int, int] | None:
    """Layer, chunk bytes and extent offset of a later extent of the part whose first header is ``first``, if it is one.

    Looks at the first ``PEEK_BYTES`` only and not at the digest: quick, for what is served is checked again.
    """
    if len(block) < PEEK_BYTES:
        return None
    begin, run, layer, counts, chunks, chunk_bytes, payload_bytes, place, offset = _PEEKED.unpack_from(block)
    begin_1, run_1, _, counts_1, chunks_1, _, _, place_1, _ = _PEEKED.unpack_from(first)
    same = (begin, run, counts, chunks, place) == (begin_1, run_1, counts_1, chunks_1, place_1)
    return (layer, chunk_bytes, offset) if same and payload_bytes == chunks * chunk_bytes else None


def check_header(header: ExtentHeader, expected: ExtentHeader) -> None:
    """Compare what was read with what the index promised; digests are left out.

    Raises:
        CorruptExtentError: names the first field that differs.
    """
    for name in _IDENTITY:
        found, wanted = getattr(header, name), getattr(expected, name)
        if found != wanted:
            raise CorruptExtentError(f"extent has {name} {_show(found)}, expected {_show(wanted)}")


_IDENTITY = (
    "namespace_id", "keys", "layer", "num_layers", "chunk_bytes", "first_chunk", "run_id", "stripe",
    "num_stripes", "members", "rotation", "segment", "part_offset", "part_bytes", "extent_offset",
)  # fmt: skip


def _show(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], bytes):
        return f"[{len(value)} keys, first {value[0].hex()[:12]}]"
    return value.hex() if isinstance(value, bytes) else str(value)


def bad_chunks(header: ExtentHeader, payloads: Sequence[Buffer], start: int) -> list[int]:
    """Which of chunks ``start``, ``start + 1``, ... of the run have other bytes in ``payloads`` than were written."""
    return [index for index, data in enumerate(payloads, start) if digest(data) != header.digests[index]]
