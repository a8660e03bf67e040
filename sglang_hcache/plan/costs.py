"""What one layer costs, by method: counted from the model's sizes and the speed of a machine.

N is the number of tokens that come back, D the hidden size. For multi-head attention and a plain feed forward
network of width 4·D the counts are those of [HCache §3.2] ("Fast State Restoration in LLM Serving with HCache",
EuroSys '25, arXiv 2410.05004)::

    IO_hidden = N·D·bytes / bandwidth         C_hidden = 4·N·D² / FLOP/s
    IO_kv   = 2·N·D·bytes / bandwidth         C_token  = (C_attn + C_ffn) = (8·N·D² + N²·D + 16·N·D²) / FLOP/s

so that recomputing takes 6 + N / 4·D times as long as projecting. Everything else (GQA, heads that are not D
wide, a gated network, other dtypes) is the same count with the model's own sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Seconds that one layer of one restore keeps the two resources busy. Not negative.

    The planner knows nothing else of a machine or a model: who measures more exactly makes another one of these.
    """

    io_hidden_s: float
    """Read the layer's hidden states."""
    io_kv_s: float
    """Read the layer's K and V."""
    compute_hidden_s: float
    """Project hidden states to K and V, rotate K, write both into the pool."""
    compute_kv_s: float
    """Write K and V that were read into the pool."""
    compute_recompute_s: float
    """Run the whole layer over the tokens. Their ids are read in no time [HCache §3.2]."""
    contention: float = 0.0
    """Share of the shorter that the longer does not hide, of reading and computing at once. 0: neither knows of the
    other, as in the paper; 1: they take turns."""

    def __post_init__(self) -> None:
        check_contention(self.contention)
        for name in LayerCosts.__slots__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a number of seconds, not negative, got {value!r}")

    def io_s(self, method: Method) -> float:
        """Seconds of I/O of a layer that comes back by ``method``."""
        return {Method.HIDDEN: self.io_hidden_s, Method.KV: self.io_kv_s, Method.RECOMPUTE: 0.0}[method]

    def compute_s(self, method: Method) -> float:
        """Seconds of computation of a layer that comes back by ``method``."""
        return {
            Method.HIDDEN: self.compute_hidden_s,
            Method.KV: self.compute_kv_s,
            Method.RECOMPUTE: self.compute_recompute_s,
        }[method]

    def scaled(self, *, io: float = 1.0, compute: float = 1.0) -> LayerCosts:
        """The costs under load: I/O takes ``io`` and computation ``compute`` times as long.

        Raises:
            ValueError: a factor is negative or not a number.
        """
        return replace(
            self,
            io_hidden_s=io * self.io_hidden_s,
            io_kv_s=io * self.io_kv_s,
            compute_hidden_s=compute * self.compute_hidden_s,
            compute_kv_s=compute * self.compute_kv_s,
            compute_recompute_s=compute * self.compute_recompute_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine in two numbers.

    Raises:
        ValueError: one of them is not a positive number.
    """

    flops: float
    """Matrix products: effective FLOP/s, what a large product really reaches, not the data sheet's peak."""
    io_bytes_per_s: float
    """What reading from the tier reaches, all devices together."""

    def __post_init__(self) -> None:
        for name in Hardware.__slots__:
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")


def projection_flops(shape: ModelShape) -> int:
    """FLOPs of making K and V of a token's hidden state in one layer.

    Two matrices of D x kv_size, two FLOPs an entry: 4·D² for MHA (C_hidden of [HCache §3.2]).
    """
    return 4 * shape.hidden_size * shape.kv_size


def linear_flops(shape: ModelShape) -> int:
    """FLOPs of a token in all matrices of one layer, without attention's scores and weighted sum.

    24·D² for MHA and a plain network of width 4·D (C_token of [HCache §3.2] but for N²·D).
    """
    query_and_output = 4 * shape.hidden_size * shape.attention_size
    ffn = 2 * shape.ffn.num_matrices * shape.hidden_size * shape.ffn_size
    return query_and_output + projection_flops(shape) + ffn


def check_contention(value: float) -> None:
    """``ValueError`` unless it is a share."""
    if not 0 <= value <= 1:
        raise ValueError(f"contention must be from 0 to 1, got {value!r}")


def check_range(num_tokens: int, start: int) -> None:
    """``ValueError`` unless there is at least one token and none before the history begins."""
    if num_tokens < 1:
        raise ValueError(f"a restore has at least one token, got {num_tokens}")
    if start < 0:
        raise ValueError(f"the first token's position must not be negative, got {start}")
