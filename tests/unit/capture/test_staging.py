from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.capture.staging import RowSpan, StagingRing

ROWS = 20


@given(st.lists(st.one_of(st.integers(1, ROWS), st.none()), max_size=60), st.randoms())
def test_spans_never_overlap_and_everything_comes_back(steps: list[int | None], random: object) -> None:
    ring = StagingRing([torch.zeros(1, ROWS, 1)])
    held: list[RowSpan] = []
    for step in steps:
        if step is None:
            if held:
                ring.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        span = ring.reserve(step)
        if span is None:
            assert held, "an empty ring has room for every request up to its size"
            continue
        assert span.first >= 0
        assert span.first + span.count <= ROWS
        for other in held:
            assert span.first + span.count <= other.first or other.first + other.count <= span.first
        held.append(span)
    for span in held:
        ring.release(span)
    assert ring.reserve(ROWS) is not None


def test_more_rows_than_the_ring_has_are_refused() -> None:
    ring = StagingRing([torch.zeros(1, ROWS, 1)])
    assert ring.reserve(ROWS + 1) is None


def test_rows_are_reused_in_a_circle() -> None:
    ring = StagingRing([torch.zeros(1, ROWS, 1)])
    first, second = ring.reserve(8), ring.reserve(8)
    assert first is not None
    assert second is not None
    assert ring.reserve(8) is None
    ring.release(first)
    third = ring.reserve(8)
    assert third is not None
    assert third.first == 0
