"""Costs of one layer: the paper's formulas for MHA, the same count for everything else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import (
    Hardware,
    LayerCosts,
    attention_flops,
    ffn_flops,
    projection_flops,
    recompute_flops,
)
from sglang_hcache.plan.shapes import NAMED_SHAPES, FFNKind
from tests.unit.plan.formulas import analytic_costs, c_hidden, c_recompute, io_hidden, io_kv

MHA = NAMED_SHAPES["opt-30b"]
GQA = NAMED_SHAPES["llama3-8b"]
HARDWARE = Hardware(flops=2e14, io_bytes_per_s=26e9)

lengths = st.integers(1, 200_000)


@given(n=lengths)
def test_formulas_of_the_paper_for_mha_with_a_plain_network(n):
    """[HCache §3.2], all numbers whole: no tolerance."""
    d = MHA.hidden_size
    assert projection_flops(MHA, n) == 4 * n * d**2
    assert attention_flops(MHA, n) == 8 * n * d**2 + n**2 * d
    assert ffn_flops(MHA, n) == 16 * n * d**2
    assert recompute_flops(MHA, n) == 24 * n * d**2 + n**2 * d


@given(n=lengths)
def test_times_of_the_paper_for_mha_with_a_plain_network(n):
    d = MHA.hidden_size
    assert io_hidden(MHA, HARDWARE, n) == pytest.approx(n * d * 2 / 26e9, rel=1e-12)
    assert io_kv(MHA, HARDWARE, n) == pytest.approx(2 * n * d * 2 / 26e9, rel=1e-12)
    assert c_hidden(MHA, HARDWARE, n) == pytest.approx(4 * n * d**2 / 2e14, rel=1e-12)
    ratio = c_recompute(MHA, HARDWARE, n) / c_hidden(MHA, HARDWARE, n)
    assert ratio == pytest.approx(6 + n / (4 * d), rel=1e-12)


def test_gqa_and_gated_network():
    """Llama 3 8B, matrix by matrix."""
    n = 1000
    d, kv, f = 4096, 1024, 14336
    assert projection_flops(GQA, n) == 2 * n * d * kv * 2
    assert attention_flops(GQA, n) == 2 * n * (d * d * 2 + d * kv * 2) + n * n * d
    assert ffn_flops(GQA, n) == 2 * n * 3 * d * f
    assert io_hidden(GQA, HARDWARE, n) == 2 * io_kv(GQA, HARDWARE, n)


def test_gated_network_costs_half_as_much_again_as_a_plain_one_of_its_width():
    plain = replace(GQA, ffn=FFNKind.PLAIN)
    assert ffn_flops(GQA, 64) * 2 == ffn_flops(plain, 64) * 3


def test_heads_that_are_not_as_wide_as_the_model():
    """Gemma 7B: 16 heads of 256 beside a hidden size of 3072."""
    gemma = NAMED_SHAPES["gemma-7b"]
    assert projection_flops(gemma, 1) == 2 * 3072 * 4096 * 2
    assert attention_flops(gemma, 1, factor=0) == 2 * 3072 * 4096 * 4
    assert attention_flops(gemma, 10) - attention_flops(gemma, 10, factor=0) == 100 * 4096


def test_dtypes_change_bytes_not_products():
    wide = MHA.with_dtype("float32")
    assert io_hidden(wide, HARDWARE, 64) == 2 * io_hidden(MHA, HARDWARE, 64)
    assert io_kv(wide, HARDWARE, 64) == 2 * io_kv(MHA, HARDWARE, 64)
    assert c_hidden(wide, HARDWARE, 64) == c_hidden(MHA, HARDWARE, 64)
    small_kv = replace(MHA, kv_dtype_bytes=1)
    assert io_kv(small_kv, HARDWARE, 64) == io_hidden(small_kv, HARDWARE, 64)


@given(first=st.integers(1, 5000), second=st.integers(1, 5000))
def test_two_pieces_of_a_history_cost_as_much_as_the_whole(first, second):
    whole = recompute_flops(GQA, first + second, factor=2)
    pieces = recompute_flops(GQA, first, factor=2)
    pieces += recompute_flops(GQA, second, first, factor=2)
    assert pieces == whole


def test_every_method_writes_k_and_v():
    writing = replace(HARDWARE, kv_write_bytes_per_s=1e12)
    free, paid = analytic_costs(MHA, HARDWARE, 512), analytic_costs(MHA, writing, 512)
    write_s = 512 * MHA.kv_row_bytes / 1e12
    assert free.compute_kv_s == 0
    for name in ("compute_hidden_s", "compute_kv_s", "compute_recompute_s"):
        assert getattr(paid, name) == pytest.approx(getattr(free, name) + write_s)
    assert paid.io_kv_s == free.io_kv_s


def test_reads_begin_late():
    late = replace(HARDWARE, io_fixed_s=0.001)
    assert analytic_costs(MHA, late, 64).io_hidden_s == 0.001 + analytic_costs(MHA, HARDWARE, 64).io_hidden_s


def test_load_slows_one_resource_down():
    costs = analytic_costs(MHA, HARDWARE, 64)
    busy = costs.scaled(io=3.0, compute=2.0)
    assert busy.io_s(Method.KV) == 3 * costs.io_kv_s
    assert busy.compute_s(Method.RECOMPUTE) == 2 * costs.compute_recompute_s
    assert busy.io_s(Method.RECOMPUTE) == 0


@pytest.mark.parametrize(
    "change", [{"flops": 0.0}, {"io_bytes_per_s": -1.0}, {"flops": math.nan}, {"io_fixed_s": -1.0}]
)
def test_hardware_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(HARDWARE, **change)


def test_costs_refuse():
    with pytest.raises(ValueError, match="io_kv_s must be a number of seconds"):
        LayerCosts(
            io_hidden_s=0, io_kv_s=-1, compute_hidden_s=0, compute_kv_s=0, compute_recompute_s=math.inf
        )
    with pytest.raises(ValueError, match="contention must be from 0 to 1, got 2"):
        replace(analytic_costs(MHA, HARDWARE, 1), contention=2)
    with pytest.raises(ValueError, match="at least one token"):
        analytic_costs(MHA, HARDWARE, 0)
    with pytest.raises(ValueError, match="position must not be negative"):
        analytic_costs(MHA, HARDWARE, 1, start=-1)
