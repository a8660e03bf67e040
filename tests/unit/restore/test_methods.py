"""Stored rows to K and V, layer by layer, by their method."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.kv_rows import KVRows
from sglang_hcache.restore.lanes import Lanes
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

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer], self.v[layer]

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
    restorer.restore([StoredRows.of(0, Method.HIDDEN, hidden)], positions, slots)
    rows = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    restorer.restore([StoredRows.of(1, Method.KV, rows)], positions, slots)
    assert torch.equal(pool.read(0, slots)[0][:, 0, 0], positions.float())
    assert torch.equal(pool.read(0, slots)[1][:, 1, 2], hidden[:, 0])
    assert torch.equal(pool.read(1, slots)[0], key)
    assert torch.equal(pool.read(1, slots)[1], value)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert pool.k[:, others].isnan().all(), "no other slot is touched"


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_in_several_places_come_back_from_there(
    lanes: int | None, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever stores K and V: compiled, without a copy."""
    monkeypatch.setattr("sglang_hcache.restore.lanes._ROWS_WORTH_A_LANE", 5)
    monkeypatch.setattr("sglang_hcache.restore.methods.ROWS_AT_ONCE", 4)
    rows, sources, store = KVRows.load() if is_compiled else None, set[int](), KVRows.store
    assert (rows is not None) == is_compiled

    def stored_from(self: KVRows, memory: torch.Tensor, *args: Any) -> None:
        sources.add(memory.data_ptr())
        store(self, memory, *args)

    monkeypatch.setattr(KVRows, "store", stored_from)
    pool = Pool()
    restorer = LayerRestorer(torch.float32, pool, KV_HEADS, FirstValues(), rows, lanes and Lanes(lanes))
    spans = ((20, 3), (2, 2), (11, 6))
    places = [20, 21, 22, 2, 3, 11, 12, 13, 14, 15, 16]
    slots, positions = torch.randperm(SLOTS)[: len(places)], torch.arange(len(places))
    hidden, both = torch.randn(30, HIDDEN), torch.randn(30, 2 * KV_HEADS * HEAD_DIM)
    stored = [StoredRows(0, Method.HIDDEN, hidden, spans), StoredRows(1, Method.KV, both, spans)]
    for part in restorer.start(stored, positions, slots):
        part.result()
    assert torch.equal(pool.k[0, slots, 0, 0], positions.float())
    assert torch.equal(pool.v[0, slots, 1, 2], hidden[places, 0])
    key, value = both[places].view(-1, 2, KV_HEADS, HEAD_DIM).unbind(1)
    assert torch.equal(pool.k[1, slots], key)
    assert torch.equal(pool.v[1, slots], value)
    assert sources == ({both.data_ptr()} if is_compiled else set())
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert pool.k[:, others].isnan().all(), "no other slot is touched"
