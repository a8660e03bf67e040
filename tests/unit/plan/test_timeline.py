"""Two resources, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.timeline import (
    best_timeline,
    block_totals,
    simulate,
    spread_order,
)

H, KV, RE = Method.HIDDEN, Method.KV, Method.RECOMPUTE

seconds = st.floats(0, 10) | st.sampled_from([0.0, 1.0, 2.0])
layer_costs = st.builds(
    LayerCosts,
    io_hidden_s=seconds,
    io_kv_s=seconds,
    compute_hidden_s=seconds,
    compute_kv_s=seconds,
    compute_recompute_s=seconds,
)


def costs(io_h=1.0, io_kv=2.0, c_h=1.0, c_kv=0.0, c_tok=6.0) -> LayerCosts:
    return LayerCosts(
        io_hidden_s=io_h,
        io_kv_s=io_kv,
        compute_hidden_s=c_h,
        compute_kv_s=c_kv,
        compute_recompute_s=c_tok,
    )


@st.composite
def layers(draw, most=40):
    """Methods of a model: recomputed layers first, the rest in any order."""
    rest = draw(st.lists(st.sampled_from([H, KV]), max_size=most))
    return (RE,) * draw(st.integers(0 if rest else 1, most)) + tuple(rest)


def test_hidden_states_only():
    """One layer is read before anything can be computed, and one computed when nothing is left to read."""
    timeline = simulate([H] * 4, range(4), costs(io_h=1.0, c_h=0.5))
    assert [step.read_start_s for step in timeline.steps] == [0, 1, 2, 3]
    assert [step.compute_start_s for step in timeline.steps] == [1, 2, 3, 4]
    assert (timeline.total_s, timeline.io_s, timeline.compute_s) == (4.5, 4.0, 2.0)
    assert (timeline.fill_s, timeline.io_idle_s, timeline.compute_idle_s) == (0.5, 0.5, 2.5)


def test_recomputing_fills_the_wait_for_the_first_read():
    methods = (RE, H, H, H)
    timeline = best_timeline(methods, costs(io_h=3.0, c_h=1.0, c_tok=6.0))
    assert [step.layer for step in timeline.steps] == [0, 1, 2, 3]
    assert timeline.steps[0].read_end_s == 0
    assert timeline.total_s == 10.0
    assert timeline.io_idle_s == timeline.compute_s - 8.0 == 1.0


def test_k_and_v_are_read_while_hidden_states_are_projected():
    timeline = best_timeline((KV, H, H, H), costs(io_h=1.0, c_h=2.0, io_kv=2.0))
    assert [step.method for step in timeline.steps] == [H, H, H, KV]
    assert timeline.total_s == 7.0
    assert timeline.fill_s == 1.0


def test_spread_recomputed_layers_stand_between_reads():
    """Eight of them at once would let the tier wait for a buffer."""
    methods = (RE,) * 8 + (H,) * 40
    slow_reads = costs(io_h=2.2, c_h=1.0, c_tok=6.0)
    assert spread_order(methods, slow_reads)[:8] == (0, 8, 9, 10, 11, 12, 1, 13)


def test_spread_k_and_v_come_after_the_hidden_states_they_wait_behind():
    methods = (KV, KV, H, H, H, H)
    order = spread_order(methods, costs(io_h=1.0, c_h=1.5))
    assert [methods[layer] for layer in order] == [H, H, KV, H, H, KV]


@settings(deadline=None)
@given(methods=layers(), costs=layer_costs, share=st.floats(0, 1))
def test_what_two_that_share_cores_take(methods, costs, share):
    """Of the shorter one's work, ``share`` is not hidden under the longer; the fill grows as all else does."""
    free, held = (best_timeline(methods, replace(costs, contention=each)) for each in (0.0, share))
    longer, shorter = max(free.io_s, free.compute_s), min(free.io_s, free.compute_s)
    both = longer + share * shorter
    assert max(held.io_s, held.compute_s) == pytest.approx(both, rel=1e-9, abs=1e-12)
    assert held.total_s * longer == pytest.approx(free.total_s * both, rel=1e-9, abs=1e-9)
    counts = [np.array([methods.count(method)]) for method in (RE, H, KV)]
    total, io, compute = block_totals(*counts, replace(costs, contention=share))
    assert total[0] == pytest.approx(held.total_s, rel=1e-9, abs=1e-12)
    assert (io[0], compute[0]) == pytest.approx((free.io_s, free.compute_s), rel=1e-9, abs=1e-12)


@given(methods=layers(most=3), costs=layer_costs)
def test_no_order_is_faster(methods, costs):
    """Johnson's rule against every order that keeps recomputed layers in theirs."""
    best = best_timeline(methods, costs).total_s
    num_recompute = methods.count(RE)
    for order in permutations(range(len(methods))):
        if [layer for layer in order if layer < num_recompute] == list(range(num_recompute)):
            assert simulate(methods, order, costs).total_s >= best - 1e-9


@given(methods=layers(), costs=layer_costs)
def test_a_timeline_is_possible(methods, costs):
    timeline = best_timeline(methods, costs)
    assert sorted(step.layer for step in timeline.steps) == list(range(len(methods)))
    read_end = compute_end = 0.0
    for step in timeline.steps:
        assert step.compute_start_s >= max(compute_end, step.read_end_s)
        compute_end = step.compute_end_s
        if step.method is not RE:
            assert step.read_start_s >= read_end
            read_end = step.read_end_s
    slack = 1e-9 * (1 + timeline.total_s)
    assert timeline.fill_s >= -slack
    assert max(timeline.io_s, timeline.compute_s) - slack <= timeline.total_s
    assert timeline.total_s <= timeline.io_s + timeline.compute_s + slack


@pytest.mark.parametrize(
    ("methods", "order", "message"),
    [
        ((), (), "order must name"),
        ((H, H), (0, 0), "order must name each of 2 layers once"),
        ((H, H), (0,), "order must name"),
        ((H, RE), (0, 1), "must be the first ones"),
        ((RE, RE), (1, 0), "must be the first ones, in order"),
    ],
)
def test_impossible_steps_are_refused(methods, order, message):
    with pytest.raises(ValueError, match=message):
        simulate(methods, order, costs())
