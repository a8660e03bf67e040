from __future__ import annotations

import queue
import threading
import time

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.capture.staging import RowSpan, StagingRing
from sglang_hcache.core.layout import Method, StateLayout

ROWS = 20
LAYOUT = StateLayout.of((Method.KV, Method.HIDDEN, Method.HIDDEN), hidden_row_bytes=16, kv_row_bytes=32)


def empty_ring() -> StagingRing:
    return StagingRing(torch.zeros(ROWS * sum(LAYOUT.row_bytes), dtype=torch.uint8), LAYOUT, torch.float32)


@given(st.lists(st.one_of(st.integers(1, ROWS + 1), st.just(1), st.none()), max_size=60), st.randoms())
def test_spans_never_overlap_and_everything_comes_back(steps: list[int | None], random: object) -> None:
    ring = empty_ring()
    held: list[RowSpan] = []
    for step in steps:
        if step is None:
            if held:
                ring.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        taken = {row for span in held for row in range(span.first, span.first + span.count)}
        places = [first for first in range(ROWS - step + 1) if taken.isdisjoint(range(first, first + step))]
        span = ring.reserve(step)
        assert (span is not None) == bool(places)
        if span is None:
            continue
        assert span.first == (places[0] if step > ROWS / 16 else places[-1])
        assert span.first >= 0
        assert span.first + span.count <= ROWS
        for other in held:
            assert span.first + span.count <= other.first or other.first + other.count <= span.first
        held.append(span)
    for span in held:
        ring.release(span)
    assert ring.reserve(ROWS) is not None


def test_what_another_thread_releases_is_there_again() -> None:
    ring = empty_ring()
    spans: queue.SimpleQueue[RowSpan | None] = queue.SimpleQueue()

    def release() -> None:
        while (span := spans.get()) is not None:
            ring.release(span)

    thread = threading.Thread(target=release)
    thread.start()
    reserved = 0
    while reserved < 2000:
        count = 1 + reserved % ROWS
        span = ring.reserve(count)
        if span is None:
            time.sleep(0)  # else it holds the interpreter's lock for as long as it may
        else:
            spans.put(span)
            reserved += 1
    spans.put(None)
    thread.join()
    assert ring.reserve(ROWS) is not None


def test_large_spans_leave_gaps_for_whole_passes() -> None:
    ring = StagingRing(
        torch.zeros(ROWS * sum(LAYOUT.row_bytes), dtype=torch.uint8), LAYOUT, torch.float32, pass_rows=10
    )
    for count, places in ((4, [0, 4, 10]), (7, [0, 10])):
        spans = [ring.reserve(count) for _ in places]
        assert [span and span.first for span in spans] == places
        for span in spans:
            assert span is not None
            ring.release(span)
    short = ring.reserve(6)
    whole = ring.reserve(10)
    assert short is not None
    assert whole is not None
    assert whole.first == 10
    ring.release(short)
    third = ring.reserve(10)
    assert third is not None
    assert third.first == 0
    ring.release(whole)
    assert ring.reserve(7) is not None
    ring.release(third)
    assert ring.reserve(12) is None, "what is larger than a pass has no place of its own, ..."
    ring = empty_ring()
    assert ring.reserve(12) is not None, "... but takes what there is"


def test_a_whole_pass_takes_the_only_gap_wherever_it_is() -> None:
    ring = StagingRing(
        torch.zeros(ROWS * sum(LAYOUT.row_bytes), dtype=torch.uint8), LAYOUT, torch.float32, pass_rows=10
    )
    short, decoded, whole = (ring.reserve(count) for count in (6, 1, 10))
    assert [span and span.first for span in (short, decoded, whole)] == [0, 19, 6]


def test_a_span_has_rows_of_its_own_for_every_layer() -> None:
    ring = empty_ring()
    spans = [span for count in (3, 1, 7) if (span := ring.reserve(count)) is not None]
    for number, span in enumerate(spans):
        for layer in range(LAYOUT.num_layers):
            ring.layers(span, layer, 1).fill_(10 * number + layer)
    for number, span in enumerate(spans):
        rows = ring.rows(span)
        assert [tuple(of_layer.shape) for of_layer in rows] == [(span.count, width) for width in (8, 4, 4)]
        assert all((of_layer == 10 * number + layer).all() for layer, of_layer in enumerate(rows))
        kv, hidden = (group.view(np.float32) for group in ring.groups(span))
        assert kv.shape == (1, span.count, 8)
        assert hidden.shape == (2, span.count, 4)
        assert (kv == 10 * number).all()
        assert (hidden == np.array([10 * number + 1, 10 * number + 2])[:, None, None]).all()


def test_a_span_lies_in_one_piece() -> None:
    ring = empty_ring()
    first, second = ring.reserve(3), ring.reserve(2)
    assert first is not None
    assert second is not None
    rows = ring.layers(second, 1, 2)
    assert rows.is_contiguous()
    begin = ring.layers(first, 0, 1).data_ptr()
    assert rows.data_ptr() == begin + 3 * sum(LAYOUT.row_bytes) + 2 * LAYOUT.row_bytes[0]
