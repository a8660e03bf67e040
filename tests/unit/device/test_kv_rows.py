"""Rows written and read by the compiled library are, bit for bit, what torch's operations write and read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang_hcache.device.key_steps import KeyNorm, KeySteps, Rotation
from sglang_hcache.device.kv_gather import TorchGather, load_gather
from sglang_hcache.device.kv_rows import GatheredRows, KVRows

LAYERS, HEADS, HEAD_DIM, SLOTS, POSITIONS = 4, 3, 16, 3000, 500
WIDTH = HEADS * HEAD_DIM
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVRows]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        loaded = KVRows.load()
        assert loaded is not None
        yield loaded


def pools(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    empty = torch.full((SLOTS, HEADS, head_dim), -7.0, dtype=dtype)
    return empty, empty.clone()


def rotated(key: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As SGLang's ``apply_rotary_emb`` does it."""
    cosines, sines = table[positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = key.view(len(key), HEADS, -1).chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 63, 512, 1777])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 80, 6])  # 6: rows that do not end at multiples of 16 bytes
def test_rotated_rows_land_in_their_slots_with_the_same_bits(
    rows: KVRows, dtype: torch.dtype, count: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    both = torch.randn(count, 2 * HEADS * head_dim, generator=generator).to(dtype)
    table = torch.randn(POSITIONS, head_dim, generator=generator).to(dtype)
    positions = torch.randint(POSITIONS, (count,), generator=generator)
    slots = torch.randperm(SLOTS, generator=generator)[:count]
    key, value = both.chunk(2, dim=1)
    mine, expected = pools(dtype, head_dim), pools(dtype, head_dim)
    rows.finish(key, value, KeySteps(None, Rotation(table, True, True)), positions, slots, mine)
    expected[0][slots] = rotated(key.contiguous(), table, positions)
    expected[1][slots] = value.reshape(count, HEADS, head_dim)
    assert torch.equal(mine[0], expected[0])
    assert torch.equal(mine[1], expected[1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 6])
@pytest.mark.parametrize("count", [1, 512, 1777])
def test_any_rows_are_stored_from_where_they_are(
    rows: KVRows, dtype: torch.dtype, head_dim: int, count: int
) -> None:
    width = HEADS * head_dim
    memory = torch.randn(SLOTS, 2 * width).mul(20).to(dtype)
    places, slots = torch.randperm(SLOTS)[:count], torch.randperm(SLOTS)[:count]
    mine, expected = pools(dtype, head_dim), pools(dtype, head_dim)
    rows.store(memory, places, slots, mine)
    expected[0][slots] = memory[places, :width].reshape(-1, HEADS, head_dim)
    expected[1][slots] = memory[places, width:].reshape(-1, HEADS, head_dim)
    assert torch.equal(mine[0], expected[0])
    assert torch.equal(mine[1], expected[1])


class Pool:
    """Of ``LAYERS`` layers."""

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self.memory = torch.randn(2, LAYERS, SLOTS, HEADS, head_dim).mul(50).clamp(-120, 120).to(dtype)

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory[0, layer], self.memory[1, layer]

    def write(self, *_args: object) -> None:
        raise NotImplementedError

    def read(self, *_args: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@pytest.mark.usefixtures("rows")  # built, and in the folder where it is looked for
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 6])
@pytest.mark.parametrize(("first", "count"), [(0, LAYERS), (1, 2), (3, 1)])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 1777])
def test_rows_of_layers_are_read_from_their_slots(
    dtype: torch.dtype, head_dim: int, first: int, count: int, num_rows: int
) -> None:
    pool, slots = Pool(dtype, head_dim), torch.randperm(SLOTS)[:num_rows]
    gather = load_gather(pool, LAYERS, is_cpu=True)
    assert isinstance(gather, GatheredRows)
    memory = torch.full((count + 2, num_rows, 2 * HEADS * head_dim), 7, dtype=dtype)  # one more on each side
    found, expected = memory.clone(), memory.clone()
    gather(found[1:-1], first, slots)
    TorchGather(pool)(expected[1:-1], first, slots)
    assert torch.equal(found, expected)


def test_a_position_outside_the_table_is_refused(rows: KVRows) -> None:
    key = torch.zeros(2, WIDTH)
    steps = KeySteps(None, Rotation(torch.zeros(POSITIONS, HEAD_DIM), True, True))
    with pytest.raises(IndexError, match="position 500 is not in the table of 500"):
        rows.finish(key, key, steps, torch.tensor([0, 500]), torch.tensor([0, 1]), pools(key.dtype))


def rotation(
    dtype: torch.dtype, dim: int = HEAD_DIM, *, halves: bool = True, rounds: bool = True
) -> Rotation:
    return Rotation(torch.zeros(2, dim, dtype=dtype), halves, rounds)


def test_only_what_it_knows_is_finished(rows: KVRows) -> None:
    def can(steps: KeySteps, dtype: torch.dtype = torch.bfloat16, head_dim: int = HEAD_DIM) -> bool:
        return rows.can_finish(steps, dtype, head_dim)

    known = rotation(torch.bfloat16)
    assert [can(KeySteps(None, rotation(dtype)), dtype) for dtype in (*DTYPES, torch.float16)] == [
        True,
        True,
        False,
    ]
    assert [can(KeySteps(None, rotation(torch.bfloat16, dim)), head_dim=dim) for dim in (1024, 1026)] == [
        True,
        False,
    ]
    assert can(KeySteps(None, known))
    assert not can(KeySteps(None, None))
    assert not can(KeySteps(KeyNorm(torch.ones(HEAD_DIM), 1e-6, False), known))
    assert not can(KeySteps(None, rotation(torch.bfloat16, halves=False)))
    assert not can(KeySteps(None, rotation(torch.bfloat16, rounds=False)))
    assert not can(KeySteps(None, rotation(torch.float32)))
    assert not can(KeySteps(None, rotation(torch.bfloat16, HEAD_DIM // 2)))


def test_without_a_compiler_there_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert KVRows.load() is None
    assert isinstance(load_gather(Pool(torch.float32, HEAD_DIM), LAYERS, is_cpu=True), TorchGather)
    assert "saving and restoring are slower than they could be: no C compiler" in caplog.text


def test_a_compiler_that_no_shell_would_find_is_no_error_of_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "gcc '-O2")
    with caplog.at_level(logging.WARNING):
        assert KVRows.load() is None
    assert "CC=gcc '-O2: No closing quotation" in caplog.text
