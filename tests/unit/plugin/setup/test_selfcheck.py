"""What the self-check takes for rounding, and what not. Servers show that it finds projectors (test_attention.py)."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.sglang_plugin.setup.selfcheck import _Check, _relative, tolerance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=DTYPES, ids=str)
def key(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(96, 8, 64, generator=torch.Generator().manual_seed(0)).to(request.param)


def test_rounding_is_allowed(key: torch.Tensor) -> None:
    exact, turned = key.double(), key
    for angle in (1.0, -1.0):  # rounded at every step
        cosine, sine = math.cos(angle), math.sin(angle)
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
    assert 0 < _relative(turned, exact) <= tolerance(key.dtype)


@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_key_of_a_slightly_wrong_size_is_not(key: torch.Tensor, factor: float) -> None:
    assert _relative(key * factor, key) > tolerance(key.dtype)


def test_one_wrong_value_is_not(key: torch.Tensor) -> None:
    wrong = key.clone()
    wrong[50, 3, 20] += 1
    assert _relative(wrong, key) > tolerance(key.dtype)


def test_what_is_no_number_is_the_worst(key: torch.Tensor) -> None:
    wrong = key.clone()
    wrong[0, 0, 0] = math.nan
    assert math.isnan(_relative(wrong, key))


class Pool:
    """Of two layers, and the model that writes to it: ones. Pages of 64 slots are lent."""

    def __init__(self) -> None:
        self.memory = torch.zeros(2, 2, 256, 1, 8)  # layer, K and V, slot
        self.taken = 0
        self.given_back: list[torch.Tensor] = []

    def extend(
        self, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int, positions: torch.Tensor
    ) -> None:
        self.memory[:num_layers, :, slots[start : len(tokens)]] = 1

    def allocate(self, count: int) -> torch.Tensor:
        first, self.taken = self.taken, self.taken + -(-count // 64) * 64
        return torch.arange(first, self.taken)

    def free(self, slots: torch.Tensor) -> None:
        self.given_back.append(self.memory[:, :, slots].clone())

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.memory[layer, 0, slots], self.memory[layer, 1, slots] = key, value

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.memory[layer, 0, slots], self.memory[layer, 1, slots]


def device_of(pool: Pool) -> Any:
    return SimpleNamespace(tree=pool, pool=pool, forward=pool, host_memory=host_buffer)


@pytest.fixture
def model() -> Any:
    return SimpleNamespace(
        dtype=torch.float32,
        row_dtype=torch.float32,
        vocabulary=100,
        context_length=96,
        shape=SimpleNamespace(num_layers=2),
        watch=lambda *_: (),
    )


@pytest.mark.parametrize("tokens", [1, 2, 96])
def test_rows_come_from_host_memory_where_they_do_not_lie_side_by_side(model: Any, tokens: int) -> None:
    """As a GPU's batched copies will find them: whether those work is decided at the first one."""
    pool, asked = Pool(), list[StoredRows]()
    model.context_length = tokens
    restorer: Any = SimpleNamespace(restore=lambda stored, *_: asked.extend(stored))
    with _Check(model, device_of(pool), watch=False) as check:
        check.worst(restorer, Method.KV)
        wanted = [torch.cat(pool.read(layer, check._slots[:40])[:1]) for layer in (0, 1)]
    assert [(rows.layer, rows.memory.device.type, len(rows)) for rows in asked] == [
        (layer, "cpu", min(tokens, 40)) for layer in (0, 1)
    ]
    assert all(len(rows.spans) == min(tokens, 2) for rows in asked)
    assert all(
        first + count < second for rows in asked if tokens > 1 for (first, count), (second, _) in [rows.spans]
    )
    for rows, key in zip(asked, wanted, strict=True):
        assert torch.equal(rows.memory[rows.places][:, :8], key.flatten(1)[: len(rows)])


@pytest.mark.parametrize("fails", [False, True])
def test_slots_are_given_back_without_a_nan(model: Any, fails: bool) -> None:
    pool = Pool()
    idle: Any = SimpleNamespace(restore=lambda *_: None)
    try:
        with _Check(model, device_of(pool), watch=False) as check:
            assert check.worst(idle, Method.KV).error == math.inf
            assert pool.memory.isnan().any()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert [slots.shape[2] for slots in pool.given_back] == [64, 64], "whole pages"
    assert not any(slots.isnan().any() for slots in pool.given_back)
