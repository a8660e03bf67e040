"""Plans: the exact search, what is stored, and what a restore makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.plan.costs import Hardware, LayerCosts
from sglang_hcache.plan.planner import (
    PlanKind,
    Split,
    closed_form,
    fastest_restore,
    make_plan,
    plan_stored,
    search,
    stored_bytes,
)
from sglang_hcache.plan.profile import analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES, ModelShape

H, KV, RE = Method.HIDDEN, Method.KV, Method.RECOMPUTE

seconds = st.floats(1e-3, 10)
layer_costs = st.builds(
    LayerCosts,
    io_hidden_s=seconds,
    io_kv_s=seconds,
    compute_hidden_s=seconds,
    compute_kv_s=st.just(0.0) | seconds,
    compute_recompute_s=seconds,
)
gqa_names = st.sampled_from(["llama3-8b", "llama3-70b", "qwen3-8b", "qwen2-7b", "mistral-7b-v0.3"])
machines = st.builds(Hardware, flops=st.floats(1e12, 1e15), io_bytes_per_s=st.floats(1e9, 1e11))
lengths = st.integers(1, 2000).map(lambda chunks: chunks * CHUNK_TOKENS)


def counted(shape: ModelShape, machine: Hardware, num_tokens: int) -> LayerCosts:
    return analytic_profile(shape, machine).costs({"disk": num_tokens})


def time_of(split: Split, costs: LayerCosts) -> float:
    """T of a plan by a simulation that shares nothing with ours, over all orders of the three methods' blocks."""
    parts = {
        RE: (split.recompute, 0.0, costs.compute_recompute_s),
        H: (split.hidden, costs.io_hidden_s, costs.compute_hidden_s),
        KV: (split.kv, costs.io_kv_s, costs.compute_kv_s),
    }
    times = []
    for blocks in ((RE, H, KV), (RE, KV, H), (H, RE, KV), (H, KV, RE), (KV, RE, H), (KV, H, RE)):
        read = done = 0.0
        for count, io, compute in (parts[block] for block in blocks):
            for _ in range(count):
                read += io
                done = max(done, read if io else 0.0) + compute
        times.append(max(done, read))
    return min(times)


def brute_force(costs: LayerCosts, num_layers: int, kind: PlanKind) -> float:
    times = []
    for recompute in range(num_layers + 1):
        for kv in range(num_layers - recompute + 1):
            split = Split(recompute, num_layers - recompute - kv, kv)
            allowed = {
                PlanKind.AUTO: True,
                PlanKind.HYBRID: not split.hidden,
                PlanKind.HIDDEN: split.hidden == num_layers,
                PlanKind.KV: split.kv == num_layers,
                PlanKind.RECOMPUTE: split.recompute == num_layers,
            }
            if allowed[kind]:
                times.append(time_of(split, costs))
    return min(times)


@given(costs=layer_costs, num_layers=st.integers(1, 9), kind=st.sampled_from(PlanKind))
def test_search_equals_brute_force(costs, num_layers, kind):
    plan = search(costs, num_layers, kind)
    assert plan.total_s == pytest.approx(brute_force(costs, num_layers, kind), rel=1e-9)
    assert plan.total_s == pytest.approx(time_of(plan.split, costs), rel=1e-9)
    assert len(plan.methods) == num_layers


def test_equally_fast_plans_spare_the_device():
    """Reading takes 8 s either way; K and V leave nothing to compute."""
    costs = LayerCosts(io_hidden_s=2, io_kv_s=2, compute_hidden_s=0, compute_kv_s=0, compute_recompute_s=100)
    assert search(costs, 4).split == Split(0, 0, 4) or search(costs, 4).timeline.compute_s == 0
    slower = replace(costs, compute_hidden_s=1e-12)
    assert search(slower, 4).split == Split(0, 0, 4)


def test_where_both_take_turns_nothing_is_projected_to_read_less():
    """2 s to read, or 1 s to read and 1.1 s to project; side by side that would be half the time."""
    costs = LayerCosts(io_hidden_s=1, io_kv_s=2, compute_hidden_s=1.1, compute_kv_s=0, compute_recompute_s=9)
    assert plan_stored(costs, 8).count(H) >= 7
    assert plan_stored(replace(costs, contention=1.0), 8) == (KV,) * 8
    together = 8.8 + 0.5 * 8
    both = fastest_restore((H,) * 8, replace(costs, contention=0.5))
    assert both.total_s == pytest.approx((1 + 8.8) * together / 8.8)


# --- the closed forms of [HCache §4.1.2] ---


def two_method_best(costs: LayerCosts, num_layers: int, other: Method) -> tuple[float, list[int]]:
    """The smallest max(compute, I/O) with ``other`` besides hidden states, and every ``hidden`` that has it."""

    def busy(hidden: int) -> float:
        rest = num_layers - hidden
        return max(
            hidden * costs.io_hidden_s + rest * costs.io_s(other),
            hidden * costs.compute_hidden_s + rest * costs.compute_s(other),
        )

    best = min(busy(hidden) for hidden in range(num_layers + 1))
    return best, [hidden for hidden in range(num_layers + 1) if busy(hidden) <= best * (1 + 1e-9)]


ratios = st.floats(1.05, 8)
paper_like = st.builds(
    lambda io, c, kv, tok: LayerCosts(
        io_hidden_s=io, io_kv_s=io * kv, compute_hidden_s=c, compute_kv_s=0.0, compute_recompute_s=c * tok
    ),
    seconds,
    seconds,
    ratios,
    st.floats(1.05, 20),
)


@given(costs=paper_like, num_layers=st.integers(1, 80))
def test_closed_form_is_the_best_of_its_two_methods_up_to_rounding(costs, num_layers):
    form = closed_form(costs, num_layers)
    assert form.num_layers == num_layers
    other = KV if costs.compute_hidden_s > costs.io_hidden_s else RE
    assert (form.kv if other is RE else form.recompute) == 0
    _, best = two_method_best(costs, num_layers, other)
    # It rounds up, and the best whole number is one of the two beside the exact balance.
    assert best[0] - 1 <= form.hidden <= best[-1] + 1


@given(costs=paper_like, num_layers=st.integers(1, 60))
def test_search_agrees_with_the_closed_form_where_it_applies(costs, num_layers):
    """Where hidden states lie below the line between recomputing and K and V, no mix of these two beats them."""
    hidden_share = costs.io_hidden_s / costs.io_kv_s + costs.compute_hidden_s / costs.compute_recompute_s
    assume(hidden_share < 1)
    form = closed_form(costs, num_layers)
    other = KV if costs.compute_hidden_s > costs.io_hidden_s else RE
    other_s = costs.io_kv_s if other is KV else costs.compute_recompute_s
    gap_s = abs(costs.compute_hidden_s - costs.io_hidden_s)
    share = other_s / (other_s + gap_s)  # of hidden layers, where compute and I/O end together
    balanced_s = num_layers * share * max(costs.compute_hidden_s, costs.io_hidden_s)

    found = search(costs, num_layers, with_fill=False)
    found_s = max(found.timeline.io_s, found.timeline.compute_s)
    form_timeline = make_plan(form.methods(), costs).timeline
    form_s = max(form_timeline.io_s, form_timeline.compute_s)
    one_layer_s = max(costs.compute_hidden_s, costs.io_hidden_s)
    assert balanced_s * (1 - 1e-9) <= found_s <= form_s * (1 + 1e-9)
    assert form_s <= (balanced_s + one_layer_s) * (1 + 1e-9)
    pair_s, _ = two_method_best(costs, num_layers, other)
    assert found_s <= pair_s * (1 + 1e-9)


def test_closed_form_of_equal_speeds_is_hidden_states_only():
    costs = LayerCosts(io_hidden_s=1, io_kv_s=2, compute_hidden_s=1, compute_kv_s=0, compute_recompute_s=6)
    assert closed_form(costs, 32) == Split(0, 32, 0)


def test_closed_form_refuses_what_it_does_not_cover():
    gqa = counted(NAMED_SHAPES["llama3-8b"], Hardware(flops=2e14, io_bytes_per_s=2e10), 4096)
    with pytest.raises(ValueError, match="slower to read than hidden states"):
        closed_form(gqa, 32)
    with pytest.raises(ValueError, match="at least one layer"):
        closed_form(gqa, 0)


# --- grouped-query attention ---


@given(name=gqa_names, machine=machines, length=lengths)
@example("llama3-8b", Hardware(flops=4e14, io_bytes_per_s=2.6e10), 4096)
def test_gqa_never_stores_hidden_states(name, machine, length):
    """They are larger than K and V, and must be projected as well."""
    shape = NAMED_SHAPES[name]
    costs = counted(shape, machine, length)
    assert search(costs, shape.num_layers).split.hidden == 0
    assert H not in plan_stored(costs, shape.num_layers)


def test_gqa_mixes_k_and_v_with_recomputing():
    shape = NAMED_SHAPES["llama3-8b"]
    costs = counted(shape, Hardware(flops=4e14, io_bytes_per_s=7e9), 4096)
    plan = search(costs, 32)
    assert plan.split.recompute > 0
    assert plan.split.kv > 0
    assert plan.total_s == search(costs, 32, PlanKind.HYBRID).total_s < search(costs, 32, PlanKind.KV).total_s
    assert plan_stored(costs, 32) == (KV,) * 32


# --- what is stored, and what a restore makes of it ---


KINDS_THAT_STORE = [kind for kind in PlanKind if kind is not PlanKind.RECOMPUTE]


@given(costs=layer_costs, num_layers=st.integers(1, 10), kind=st.sampled_from(KINDS_THAT_STORE))
def test_storing_loses_nothing_at_the_length_it_was_planned_for(costs, num_layers, kind):
    stored = plan_stored(costs, num_layers, kind)
    most = None if kind in (PlanKind.AUTO, PlanKind.HYBRID) else 0
    restore = fastest_restore(stored, costs, max_recompute=most)
    assert restore.total_s == pytest.approx(search(costs, num_layers, kind).total_s, rel=1e-8)
    assert len(stored) == num_layers
    assert RE not in stored


@given(
    stored=st.lists(st.sampled_from([H, KV]), min_size=1, max_size=12),
    costs=layer_costs,
    num_blocks=st.integers(1, 3),
    max_recompute=st.none() | st.integers(0, 12),
)
def test_restore_equals_brute_force_and_is_never_slower_than_recomputing(
    stored, costs, num_blocks, max_recompute
):
    found = fastest_restore(stored, costs, num_blocks=num_blocks, max_recompute=max_recompute)
    of_block = costs.scaled(io=1 / num_blocks, compute=1 / num_blocks)
    most = len(stored) if max_recompute is None else min(max_recompute, len(stored))
    plans = [
        make_plan((RE,) * count * num_blocks + tuple(stored[count:]) * num_blocks, of_block)
        for count in range(most + 1)
    ]
    assert found.total_s == pytest.approx(min(plan.total_s for plan in plans), rel=1e-8)
    timeline = plans[found.num_recompute].timeline
    assert (found.total_s, found.io_s, found.compute_s) == pytest.approx(
        (timeline.total_s, timeline.io_s, timeline.compute_s), rel=1e-8
    )
    if most == len(stored):
        assert found.total_s <= len(stored) * costs.compute_recompute_s * (1 + 1e-8)


@given(
    stored=st.lists(st.sampled_from([H, KV]), min_size=1, max_size=12),
    costs=layer_costs,
    least_gain=st.floats(1.01, 2),
)
def test_layers_are_recomputed_only_for_a_gain(stored, costs, least_gain):
    fastest, found = fastest_restore(stored, costs), fastest_restore(stored, costs, least_gain=least_gain)
    none = fastest_restore(stored, costs, max_recompute=0)
    assert found == (fastest if none.total_s > least_gain * fastest.total_s else none)


def test_slow_tier_is_left_alone():
    costs = counted(NAMED_SHAPES["llama2-7b"], Hardware(flops=2e14, io_bytes_per_s=1e7), 1024)
    assert fastest_restore((H,) * 32, costs).num_recompute == 32


def test_load_moves_work_to_the_idle_resource():
    """What is stored stays; a busy tier makes a restore recompute, a busy device does not."""
    shape = NAMED_SHAPES["llama2-7b"]
    costs = counted(shape, Hardware(flops=2e14, io_bytes_per_s=24e9), 2048)
    stored = plan_stored(costs, 32)
    recomputed = [
        fastest_restore(stored, costs.scaled(io=io, compute=compute)).num_recompute
        for io, compute in ((1, 4), (1, 1), (3, 1), (6, 1))
    ]
    assert recomputed[:2] == [0, 0]
    assert 0 < recomputed[2] < recomputed[3]


def test_long_contexts_fall_back_to_hidden_states_only():
    """Recomputing grows with the square of the length, reading and projecting do not [HCache §6.2.3]."""
    shape = NAMED_SHAPES["opt-30b"]
    profile = analytic_profile(shape, Hardware(flops=5.3e14, io_bytes_per_s=16.5e9))
    stored = plan_stored(profile.costs({"disk": 2048}), 48)
    assert stored == (H,) * 48
    recomputed = [
        fastest_restore(stored, profile.costs({"disk": n})).num_recompute
        for n in (2048, 16384, 131072, 2**20, 2**23)
    ]
    assert recomputed == sorted(recomputed, reverse=True)
    assert (recomputed[0], recomputed[-1]) == (8, 0)


def test_k_and_v_are_given_up_before_hidden_states():
    """They are the larger reads, and cost nothing to compute."""
    methods = Split(1, 2, 3).methods()
    assert methods == (RE, KV, KV, KV, H, H)
    assert Split.of(methods) == Split(1, 2, 3)


# --- bytes ---


def test_bytes_and_layout_of_what_is_stored():
    shape = replace(NAMED_SHAPES["llama2-7b"], num_layers=4)
    stored = Split(0, 3, 1).methods()
    layout = StateLayout.of(stored, shape.hidden_row_bytes, shape.kv_row_bytes)
    assert layout.row_bytes == (16384, 8192, 8192, 8192)
    assert sum(layout.row_bytes) == stored_bytes(shape, stored) == 40960
    assert stored_bytes(shape, (RE, H, H, H)) == 3 * 8192
    with pytest.raises(ValueError, match="every layer of a chunk stores something"):
        StateLayout.of((RE, H, H, H), shape.hidden_row_bytes, shape.kv_row_bytes)
