"""Costs of one layer: the paper's formulas for MHA, the same count for everything else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import Hardware, LayerCosts, linear_flops, projection_flops
from sglang_hcache.plan.profile import analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES, FFNKind, ModelShape

MHA = NAMED_SHAPES["opt-30b"]
GQA = NAMED_SHAPES["llama3-8b"]
HARDWARE = Hardware(flops=2e14, io_bytes_per_s=26e9)


def counted(shape: ModelShape, num_tokens: int, start: int = 0) -> LayerCosts:
    return analytic_profile(shape, HARDWARE).costs({"disk": num_tokens}, start)


def test_formulas_of_the_paper_for_mha_with_a_plain_network():
    """[HCache §3.2], all numbers whole: no tolerance."""
    d = MHA.hidden_size
    assert projection_flops(MHA) == 4 * d**2
    assert linear_flops(MHA) == 24 * d**2


@given(n=st.integers(1, 200_000))
def test_times_of_the_paper_for_mha_with_a_plain_network(n):
    d, costs = MHA.hidden_size, counted(MHA, n)
    assert costs.io_hidden_s == pytest.approx(n * d * 2 / 26e9, rel=1e-12)
    assert costs.io_kv_s == pytest.approx(2 * n * d * 2 / 26e9, rel=1e-12)
    assert costs.compute_hidden_s == pytest.approx(4 * n * d**2 / 2e14, rel=1e-12)
    assert costs.compute_kv_s == 0
    assert costs.compute_recompute_s == pytest.approx((24 * n * d**2 + n**2 * d) / 2e14, rel=1e-12)
    assert costs.compute_recompute_s / costs.compute_hidden_s == pytest.approx(6 + n / (4 * d), rel=1e-12)


def test_gqa_and_gated_network():
    """Llama 3 8B, matrix by matrix."""
    d, kv, f = 4096, 1024, 14336
    assert projection_flops(GQA) == 2 * d * kv * 2
    assert linear_flops(GQA) == 2 * (d * d * 2 + d * kv * 2 + 3 * d * f)
    assert counted(GQA, 1000).io_hidden_s == 2 * counted(GQA, 1000).io_kv_s


def test_a_gated_network_has_three_matrices_and_a_plain_one_two():
    plain = replace(GQA, ffn=FFNKind.PLAIN)
    assert linear_flops(GQA) - linear_flops(plain) == 2 * GQA.hidden_size * GQA.ffn_size


def test_heads_that_are_not_as_wide_as_the_model():
    """Gemma 7B: 16 heads of 256 beside a hidden size of 3072."""
    gemma = NAMED_SHAPES["gemma-7b"]
    assert projection_flops(gemma) == 2 * 3072 * 4096 * 2
    assert linear_flops(gemma) == 2 * 3072 * (4096 * 4 + 3 * gemma.ffn_size)
    squared_s = analytic_profile(gemma, HARDWARE).compute.recompute.per_token_squared_s
    assert squared_s == 4096 / HARDWARE.flops


def test_dtypes_change_bytes_not_products():
    found, wide = counted(MHA, 64), counted(MHA.with_dtype("float32"), 64)
    assert wide.io_hidden_s == 2 * found.io_hidden_s
    assert wide.io_kv_s == 2 * found.io_kv_s
    assert wide.compute_hidden_s == found.compute_hidden_s
    small_kv = counted(replace(MHA, kv_dtype_bytes=1), 64)
    assert small_kv.io_kv_s == small_kv.io_hidden_s


@given(first=st.integers(1, 5000), second=st.integers(1, 5000))
def test_two_pieces_of_a_history_cost_as_much_as_the_whole(first, second):
    whole = counted(GQA, first + second).compute_recompute_s
    pieces = counted(GQA, first).compute_recompute_s + counted(GQA, second, first).compute_recompute_s
    assert pieces == pytest.approx(whole, rel=1e-12)


def test_load_slows_one_resource_down():
    costs = counted(MHA, 64)
    busy = costs.scaled(io=3.0, compute=2.0)
    assert busy.io_s(Method.KV) == 3 * costs.io_kv_s
    assert busy.compute_s(Method.RECOMPUTE) == 2 * costs.compute_recompute_s
    assert busy.io_s(Method.RECOMPUTE) == 0


@pytest.mark.parametrize("change", [{"flops": 0.0}, {"io_bytes_per_s": -1.0}, {"flops": math.nan}])
def test_hardware_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(HARDWARE, **change)


def test_costs_refuse():
    with pytest.raises(ValueError, match="io_kv_s must be a number of seconds"):
        LayerCosts(
            io_hidden_s=0, io_kv_s=-1, compute_hidden_s=0, compute_kv_s=0, compute_recompute_s=math.inf
        )
    with pytest.raises(ValueError, match="contention must be from 0 to 1, got 2"):
        replace(counted(MHA, 1), contention=2)
    with pytest.raises(ValueError, match="at least one token"):
        counted(MHA, 0)
    with pytest.raises(ValueError, match="position must not be negative"):
        counted(MHA, 1, start=-1)
