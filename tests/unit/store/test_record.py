"""The extent header, byte by byte (docs/store-format.md)."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hcache.core.errors import CorruptExtentError
from sglang_hcache.store.format.geometry import BLOCK, MAX_SEGMENT, RunShape, extent_bytes
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.record import (
    ExtentHeader,
    bad_chunks,
    check_header,
    digest,
    pack_header,
    parse_header,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
blocks = st.integers(0, 2**40).map(lambda count: count * BLOCK)


@st.composite
def headers(draw: st.DrawFn) -> ExtentHeader:
    num_chunks, num_stripes = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    members = draw(
        st.sets(st.integers(0, num_stripes - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    )
    sizes = tuple(draw(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=320)))
    place = RunPlace(
        run_id=draw(st.binary(min_size=16, max_size=16)),
        namespace_id=draw(st.binary(min_size=16, max_size=16)),
        keys=tuple(draw(st.binary(min_size=32, max_size=32)) for _ in range(num_chunks)),
        first_chunk=draw(u32),
        shape=RunShape(num_chunks, sizes, num_stripes, members, draw(st.integers(0, len(members) - 1))),
        segment=draw(st.integers(0, MAX_SEGMENT)),
        offsets=tuple(draw(st.lists(blocks, min_size=num_stripes, max_size=num_stripes))),
    )
    digests = tuple(draw(st.lists(u64, min_size=num_chunks, max_size=num_chunks)))
    return ExtentHeader(place, draw(st.integers(0, len(sizes) - 1)), digests)


def example(**changes: object) -> ExtentHeader:
    """The worked example of docs/store-format.md."""
    shape = {
        "num_chunks": len(changes.get("keys", (1, 2))),  # type: ignore[arg-type]
        "chunk_layer_bytes": (8192,) * 4,
        "num_stripes": 2,
        "members": (0, 1),
        "rotation": 1,
    }
    place = {
        "run_id": bytes(range(16, 32)),
        "namespace_id": bytes(range(16)),
        "keys": (b"\xaa" * 32, b"\xbb" * 32),
        "first_chunk": 5,
        "segment": 42,
        "offsets": (0x10000, 0x10000 + 40960),
    }
    header = {"layer": 3, "digests": (0x1122334455667788, 0x99AABBCCDDEEFF00)}
    for fields in (shape, place, header):
        fields.update({name: value for name, value in changes.items() if name in fields})
    return ExtentHeader(RunPlace(shape=RunShape(**shape), **place), **header)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(headers())
def test_what_is_packed_is_parsed(header: ExtentHeader) -> None:
    block = pack_header(header)
    assert len(block) == BLOCK
    assert parse_header(block) == header


@settings(max_examples=100, deadline=None)
@given(st.integers(0, BLOCK * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    block = bytearray(pack_header(example()))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptExtentError):
        parse_header(block)


def test_a_header_has_the_documented_bytes() -> None:
    block = pack_header(example())
    assert block[0:8] == b"HCEXTENT"
    assert struct.unpack_from("<II", block, 8) == (5, 4096)
    zeroed = block[:16] + bytes(8) + block[24:]
    assert struct.unpack_from("<Q", block, 16) == (xxhash.xxh3_64_intdigest(zeroed),)
    assert block[24:40] == bytes(range(16))
    assert block[40:56] == bytes(range(16, 32))
    assert struct.unpack_from("<IIII", block, 56) == (3, 4, 5, 2)
    assert struct.unpack_from("<QHHH", block, 72) == (42, 2, 1, 3)
    assert block[86:128] == bytes(42)
    assert block[128:192] == b"\xaa" * 32 + b"\xbb" * 32
    assert block[192:2176] == bytes(2176 - 192)
    assert struct.unpack_from("<QQ", block, 2176) == (0x1122334455667788, 0x99AABBCCDDEEFF00)
    assert block[2192:2688] == bytes(496)
    assert struct.unpack_from("<QQ", block, 2688) == (0x10000, 0x1A000)
    assert block[2704:2816] == bytes(112)
    assert struct.unpack_from("<4I", block, 2816) == (8192,) * 4
    assert block[2832:] == bytes(BLOCK - 2832)


def test_the_worked_example_of_the_document_is_true() -> None:
    text = (Path(__file__).parents[3] / "docs" / "store-format.md").read_text()
    block = pack_header(example())
    lines = re.findall(r"^    ([0-9a-f]{4})((?: {1,2}[0-9a-f]{2}){16})   ", text, re.MULTILINE)
    assert len(lines) == 9
    for offset, data in lines:
        at = int(offset, 16)
        assert block[at : at + 16] == bytes.fromhex(data), offset


def test_bad_magic() -> None:
    block = b"NOTMAGIC" + pack_header(example())[8:]
    with pytest.raises(CorruptExtentError, match="magic"):
        parse_header(block)


def test_bad_version_even_with_a_good_digest() -> None:
    block = bytearray(pack_header(example()))
    struct.pack_into("<I", block, 8, 1)
    struct.pack_into("<QI", block, 16, 0, 0)
    struct.pack_into("<Q", block, 16, digest(block))
    with pytest.raises(CorruptExtentError, match="version 1"):
        parse_header(block)


def test_short_header() -> None:
    with pytest.raises(CorruptExtentError, match="100 of 4096"):
        parse_header(pack_header(example())[:100])


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (68, "<I", 0),
        (68, "<I", 65),
        (68, "<I", 2**32 - 1),
        (60, "<I", 0),
        (60, "<I", 5),
        (60, "<I", 321),
        (60, "<I", 2**32 - 1),
        (56, "<I", 4),
        (72, "<Q", 10**15),
        (80, "<H", 0),
        (80, "<H", 17),
        (82, "<H", 2),
        (84, "<H", 0),
        (84, "<H", 7),
        (2820, "<I", 0),
    ],
)
def test_contradicting_fields_even_with_a_good_digest(at: int, form: str, value: int) -> None:
    block = bytearray(pack_header(example()))
    struct.pack_into(form, block, at, value)
    struct.pack_into("<Q", block, 16, 0)
    struct.pack_into("<Q", block, 16, digest(block))
    with pytest.raises(CorruptExtentError):
        parse_header(block)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ()},
        {"keys": (b"k" * 32,) * 65, "digests": (0,) * 65},
        {"digests": (1,)},
        {"keys": (b"short", b"k" * 32)},
        {"run_id": b"short"},
        {"layer": 4},
        {"chunk_layer_bytes": (1,) * 321},
        {"num_stripes": 17, "offsets": (0,) * 17},
        {"offsets": (0,)},
        {"segment": 10**15},
    ],
)
def test_impossible_headers_are_not_written(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        pack_header(example(**change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace_id", b"x" * 16),
        ("run_id", b"x" * 16),
        ("keys", (b"\xaa" * 32, b"\xcc" * 32)),
        ("layer", 1),
        ("chunk_layer_bytes", (8192,) * 5),
        ("first_chunk", 6),
        ("rotation", 0),
        ("members", (0,)),
        ("segment", 41),
        ("offsets", (0, 0)),
    ],
)
def test_every_identity_field_is_compared(field: str, value: object) -> None:
    with pytest.raises(CorruptExtentError, match="another one"):
        check_header(example(**{field: value}), example().place, example().layer)


def test_digests_are_not_part_of_the_identity() -> None:
    check_header(example(digests=(1, 2)), example().place, example().layer)


def test_a_prefix_and_a_middle_of_a_run_can_be_verified_alone() -> None:
    chunks = [bytes([number]) * 64 for number in range(3)]
    header = example(keys=(b"k" * 32,) * 3, digests=tuple(digest(chunk) for chunk in chunks))
    assert bad_chunks(header, chunks[:2], 0) == []
    assert bad_chunks(header, chunks[1:2], 1) == []
    assert bad_chunks(header, [chunks[0], chunks[0], chunks[2]], 0) == [1]
    assert bad_chunks(header, chunks[1:2], 2) == [2]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 64),
    st.lists(st.integers(1, 50_000), min_size=1, max_size=12),
    st.sets(st.integers(0, 4), min_size=1).map(lambda found: tuple(sorted(found))),
    st.integers(0, 4),
)
def test_extents_of_a_run_tile_its_parts(
    chunks: int, layers: list[int], members: tuple[int, ...], turn: int
) -> None:
    num_stripes, rotation = 5, turn % len(members)
    shape = RunShape(chunks, tuple(layers), num_stripes, members, rotation)
    ends = [0] * num_stripes
    for layer, chunk_bytes in enumerate(layers):
        stripe = shape.stripe(layer)
        assert stripe == members[(layer + rotation) % len(members)]
        assert shape.layer_offsets[layer] == ends[stripe]
        ends[stripe] += extent_bytes(chunks, chunk_bytes)
        assert ends[stripe] % BLOCK == 0
    assert shape.part_bytes == tuple(ends)
