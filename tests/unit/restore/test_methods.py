"""Stored rows to K and V, layer by layer, by their method."""

from __future__ import annotations

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.rows import StoredRows

KV_HEADS, HEAD_DIM, HIDDEN, SLOTS = 2, 3, 8, 40


class Pool:
    def __init__(self) -> None:
        self.k = torch.full((2, SLOTS, KV_HEADS, HEAD_DIM), torch.nan)
        self.v = self.k.clone()

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.k[layer][slots] = key
        self.v[layer][slots] = value

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer][slots], self.v[layer][slots]


class FirstValues:
    """K is the position, V the first value of the hidden state."""

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, KV_HEADS, HEAD_DIM)
        return positions.float()[:, None, None].expand(shape), hidden[:, :1, None].expand(shape)


def test_rows_come_back_by_their_method() -> None:
    pool = Pool()
    restorer = LayerRestorer(torch.float32, pool, KV_HEADS, FirstValues())
    slots, positions = torch.randperm(SLOTS)[:10], torch.arange(100, 110)
    hidden = torch.randn(10, HIDDEN)
    key, value = torch.randn(10, KV_HEADS, HEAD_DIM), torch.randn(10, KV_HEADS, HEAD_DIM)
    restorer.restore(StoredRows.of(0, Method.HIDDEN, hidden), positions, slots)
    rows = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    restorer.restore(StoredRows.of(1, Method.KV, rows), positions, slots)
    assert torch.equal(pool.read(0, slots)[0][:, 0, 0], positions.float())
    assert torch.equal(pool.read(0, slots)[1][:, 1, 2], hidden[:, 0])
    assert torch.equal(pool.read(1, slots)[0], key)
    assert torch.equal(pool.read(1, slots)[1], value)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert pool.k[:, others].isnan().all(), "no other slot is touched"
