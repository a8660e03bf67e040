"""What the kernels read out of the pool is what torch's operations read, and they write it where it was."""

from __future__ import annotations

import pytest
import torch

from sglang_hcache.device.kv_gather import TorchGather
from sglang_hcache.device.triton_layers import TritonGather, TritonScatter

LAYERS, SLOTS = 4, 30
UNTOUCHED = -7


class Pool:
    def __init__(self, dtype: torch.dtype, heads: int, head_dim: int) -> None:
        draw = torch.Generator().manual_seed(head_dim)
        shape = (2, LAYERS, SLOTS, heads, head_dim)
        self.memory = torch.randn(shape, generator=draw).mul(50).clamp(-120, 120).to(dtype)

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory[0, layer], self.memory[1, layer]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (1, 80), (40, 128)])
def test_any_row(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    check(dtype, heads, head_dim, 1, 2, 7)


@pytest.mark.parametrize(("first", "count"), [(0, LAYERS), (1, 2), (3, 1)])
@pytest.mark.parametrize("rows", [1, 7, 0])
def test_layers_at_once(first: int, count: int, rows: int) -> None:
    check(torch.bfloat16, 3, 64, first, count, rows)


def check(dtype: torch.dtype, heads: int, head_dim: int, first: int, count: int, rows: int) -> None:
    pool = Pool(dtype, heads, head_dim)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(rows))[:rows]
    expected = torch.full((count, rows, 2 * heads * head_dim), UNTOUCHED, dtype=dtype)
    found = expected.clone()
    TorchGather(pool)(expected, first, slots)  # type: ignore[arg-type]
    TritonGather([pool.buffers(layer) for layer in range(LAYERS)])(found, first, slots)
    assert torch.equal(found, expected)
    if rows:
        assert torch.equal(found[0, 0, : heads * head_dim], pool.memory[0, first, slots[0]].flatten())
    written, elsewhere = Pool(dtype, heads, head_dim), slots.flip(0)
    written.memory.fill_(UNTOUCHED)
    scatter = TritonScatter([written.buffers(layer) for layer in range(LAYERS)])
    scatter(found.flatten(0, 1), first, elsewhere)
    true = torch.full_like(written.memory, UNTOUCHED)
    true[:, first : first + count, elsewhere] = pool.memory[:, first : first + count, slots]
    assert torch.equal(written.memory, true), "these rows, and nothing else"


def test_it_writes_nowhere_else() -> None:
    pool = Pool(torch.float32, 3, 64)
    memory = torch.full((LAYERS + 2, 5, 2 * 3 * 64), UNTOUCHED)
    gather = TritonGather([pool.buffers(layer) for layer in range(LAYERS)])
    gather(memory[1:-1], 0, torch.arange(5))
    assert (memory[0] == UNTOUCHED).all()
    assert (memory[-1] == UNTOUCHED).all()
    assert (memory[1:-1] != UNTOUCHED).all()


def test_rows_of_another_type_are_refused() -> None:
    """The kernel would take the pool for memory of theirs."""
    pool = Pool(torch.float32, 3, 64)
    scatter = TritonScatter([pool.buffers(layer) for layer in range(LAYERS)])
    with pytest.raises(AssertionError, match=r"rows of torch\.float16 for a pool of torch\.float32"):
        scatter(torch.zeros(2, 2 * 3 * 64, dtype=torch.float16), 0, torch.arange(2))
