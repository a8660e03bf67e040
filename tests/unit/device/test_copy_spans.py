"""Rows that lie apart, copied by their addresses."""

from __future__ import annotations

import ctypes

import pytest
import torch

from sglang_hcache.device.streams import copy_spans


def memmove(target: int, source: int, num_bytes: int, kind: int, stream: int) -> int:
    """What ``cudaMemcpyAsync`` does, at once."""
    assert (kind, stream) == (4, 7)
    ctypes.memmove(target, source, num_bytes)
    return 0


@pytest.mark.parametrize("spans", [[(2, 3)], [(5, 1), (0, 2), (9, 1)], [(0, 10)], []])
def test_rows_come_behind_each_other(spans: list[tuple[int, int]]) -> None:
    memory = torch.arange(12 * 6, dtype=torch.float16).view(12, 6)
    source = memory[1:11]  # begins somewhere in memory
    count = sum(count for _, count in spans)
    into = torch.full((count + 2, 6), -1.0, dtype=torch.float16)
    copy_spans(memmove, into[1 : 1 + count], source, spans, 7)
    expected = [source[first : first + count] for first, count in spans]
    assert torch.equal(into[1 : 1 + count], torch.cat([source[:0], *expected]))
    assert (into[[0, -1]] == -1).all()


def test_an_error_of_cuda_is_raised() -> None:
    rows = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="error 719"):
        copy_spans(lambda *_: 719, rows.clone(), rows, [(0, 1), (1, 1)], 0)
