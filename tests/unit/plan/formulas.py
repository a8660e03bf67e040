"""The paper's formulas written out: what the curves of a counted profile must say for every length."""

from __future__ import annotations

from sglang_hcache.plan.costs import Hardware, LayerCosts, check_range, projection_flops, recompute_flops
from sglang_hcache.plan.shapes import ModelShape


def io_hidden(shape: ModelShape, hardware: Hardware, num_tokens: int) -> float:
    """Seconds to read one layer's hidden states: N·D·bytes over the bandwidth ([HCache §3.2], IO_hidden)."""
    return hardware.io_fixed_s + num_tokens * shape.hidden_row_bytes / hardware.io_bytes_per_s


def io_kv(shape: ModelShape, hardware: Hardware, num_tokens: int) -> float:
    """Seconds to read one layer's K and V: 2·N·D·bytes over the bandwidth for MHA ([HCache §3.2], IO_kv)."""
    return hardware.io_fixed_s + num_tokens * shape.kv_row_bytes / hardware.io_bytes_per_s


def c_kv_write(shape: ModelShape, hardware: Hardware, num_tokens: int) -> float:
    """Seconds to write one layer's K and V into the pool. Every method does it; the paper leaves it out."""
    return num_tokens * shape.kv_row_bytes / hardware.kv_write_bytes_per_s


def c_hidden(shape: ModelShape, hardware: Hardware, num_tokens: int) -> float:
    """Seconds to project one layer's hidden states and write K and V ([HCache §3.2], C_hidden)."""
    seconds = projection_flops(shape, num_tokens) / hardware.flops
    return seconds + c_kv_write(shape, hardware, num_tokens)


def c_recompute(shape: ModelShape, hardware: Hardware, num_tokens: int, start: int = 0) -> float:
    """Seconds to run one layer over the tokens from position ``start`` on ([HCache §3.2], C_attn + C_ffn)."""
    flops = recompute_flops(shape, num_tokens, start, hardware.attention_factor)
    return flops / hardware.flops + c_kv_write(shape, hardware, num_tokens)


def analytic_costs(shape: ModelShape, hardware: Hardware, num_tokens: int, start: int = 0) -> LayerCosts:
    """All five costs of one layer for ``num_tokens`` tokens from position ``start`` on.

    Raises:
        ValueError: ``num_tokens`` below 1 or ``start`` below 0.
    """
    check_range(num_tokens, start)
    return LayerCosts(
        io_hidden_s=io_hidden(shape, hardware, num_tokens),
        io_kv_s=io_kv(shape, hardware, num_tokens),
        compute_hidden_s=c_hidden(shape, hardware, num_tokens),
        compute_kv_s=c_kv_write(shape, hardware, num_tokens),
        compute_recompute_s=c_recompute(shape, hardware, num_tokens, start),
    )
