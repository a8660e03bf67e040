"""The paper's formulas written out for N tokens: what the curves of a counted profile must say for every length."""

from __future__ import annotations

import math

from sglang_hcache.plan.costs import Hardware, LayerCosts, check_range
from sglang_hcache.plan.shapes import ModelShape


def projection_flops(shape: ModelShape, num_tokens: int) -> int:
    """Two matrices of D x kv_size, two FLOPs an entry: 4·N·D² for MHA (C_hidden of [HCache §3.2])."""
    return 4 * num_tokens * shape.hidden_size * shape.kv_size


def attention_flops(shape: ModelShape, num_tokens: int, start: int = 0) -> int:
    """Four projections, scores and weighted sum: 8·N·D² + N²·D for MHA (C_attn of [HCache §3.2]).

    The N tokens from position ``start`` on also look at those before them: N² becomes ``(start + N)² - start²``.
    """
    query_and_output = 4 * num_tokens * shape.hidden_size * shape.attention_size
    pairs = (start + num_tokens) ** 2 - start**2
    return query_and_output + projection_flops(shape, num_tokens) + pairs * shape.attention_size


def ffn_flops(shape: ModelShape, num_tokens: int) -> int:
    """Two FLOPs for each entry of its matrices: 16·N·D² for two of D x 4·D (C_ffn of [HCache §3.2])."""
    return 2 * shape.ffn.num_matrices * num_tokens * shape.hidden_size * shape.ffn_size


def analytic_costs(
    shape: ModelShape,
    hardware: Hardware,
    num_tokens: int,
    start: int = 0,
    *,
    io_fixed_s: float = 0.0,
    kv_write_bytes_per_s: float = math.inf,
) -> LayerCosts:
    """All five costs of one layer for ``num_tokens`` tokens from position ``start`` on.

    Args:
        io_fixed_s: before the first byte of each read arrives; the paper leaves it out.
        kv_write_bytes_per_s: writing K and V into the pool, which every method does; likewise.

    Raises:
        ValueError: ``num_tokens`` below 1 or ``start`` below 0.
    """
    check_range(num_tokens, start)
    write_s = num_tokens * shape.kv_row_bytes / kv_write_bytes_per_s
    layer_flops = attention_flops(shape, num_tokens, start) + ffn_flops(shape, num_tokens)
    return LayerCosts(
        io_hidden_s=io_fixed_s + num_tokens * shape.hidden_row_bytes / hardware.io_bytes_per_s,
        io_kv_s=io_fixed_s + num_tokens * shape.kv_row_bytes / hardware.io_bytes_per_s,
        compute_hidden_s=projection_flops(shape, num_tokens) / hardware.flops + write_s,
        compute_kv_s=write_s,
        compute_recompute_s=layer_flops / hardware.flops + write_s,
    )
