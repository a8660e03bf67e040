"""Rows of a layer that lie in several places."""

from __future__ import annotations

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.restore.rows import StoredRows

MEMORY = torch.arange(20.0).view(20, 1)
SCATTERED = StoredRows(3, Method.KV, MEMORY, ((10, 4), (0, 2), (6, 3)))
TOKENS = [10, 11, 12, 13, 0, 1, 6, 7, 8]


def tokens_of(stored: StoredRows) -> list[int]:
    return stored.memory[stored.places, 0].tolist() if stored.spans else []


def test_every_part_has_its_tokens_in_order() -> None:
    assert len(SCATTERED) == 9
    for first in range(10):
        for end in range(first, 12):
            part = SCATTERED.part(first, end)
            assert tokens_of(part) == TOKENS[first:end]
            assert len(part) == len(TOKENS[first:end])
            assert (part.layer, part.method) == (3, Method.KV)


def test_what_was_moved_is_in_one_piece() -> None:
    moved = SCATTERED.moved(torch.arange(9.0).view(9, 1))
    assert torch.equal(moved.rows, torch.arange(9.0).view(9, 1))
    assert tokens_of(moved.part(2, 4)) == [2, 3]
