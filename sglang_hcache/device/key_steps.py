"""What a model does to K between its projection and the KV pool, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_PLAIN_ROTATION = "RotaryEmbedding.forward_native"
"""SGLang's implementation of the rotation that a :class:`Rotation` describes. Variants of their own are left alone."""
_PLAIN_ROTATION_ON_CUDA = "RotaryEmbedding.forward_cuda"
_PLAIN_NORM = "RMSNorm.forward_native"


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """RMSNorm of K: ``x / sqrt(mean(x²) + epsilon) * weight``, in float32."""

    weight: torch.Tensor
    """(size,): ``head_dim`` values, for each head by itself, or those of all heads together."""
    epsilon: float
    rounds_before_weight: bool
    """Whether the quotient is rounded to K's type before it is multiplied, as Hugging Face does it."""

    @property
    def size(self) -> int:
        return self.weight.numel()


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of the first ``dim`` values of each head."""

    table: torch.Tensor
    """(positions, dim), contiguous: cosines by position, then sines. What scaling of positions there is, it has it."""
    pairs_halves: bool
    """Whether value i goes with value i + dim / 2 (NeoX), or with its neighbour (GPT-J)."""
    rounds_products: bool
    """Whether each product is rounded to K's type, as torch's operations do it, or only the result."""

    @property
    def dim(self) -> int:
        return self.table.shape[1]


@dataclass(frozen=True, slots=True)
class KeySteps:
    """In this order; None: no such step."""

    norm: KeyNorm | None
    rotation: Rotation | None


def plain_norm(module: nn.Module, dtype: torch.dtype) -> KeyNorm | None:
    """The norm that a module of SGLang computes; None if it may be another one, or in other precision."""
    native = getattr(type(module), "forward_native", None)
    weight = getattr(module, "weight", None)
    is_plain = getattr(native, "__qualname__", "") == _PLAIN_NORM and isinstance(weight, torch.Tensor)
    if not is_plain or getattr(module, "variance_size_override", None) is not None:
        return None
    if getattr(module, "override_orig_dtype", None) not in (None, dtype):
        return None
    rounds_first = bool(getattr(module, "cast_x_before_out_mul", False))
    assert isinstance(weight, torch.Tensor)
    if rounds_first and weight.dtype != dtype:
        return None  # what comes out has another type than K
    return KeyNorm(weight.detach(), float(module.variance_epsilon), rounds_first)  # type: ignore[arg-type]


def is_plain_rotation(rotary: nn.Module, head_dim: int) -> bool:
    """Whether a module rotates as a :class:`Rotation` says, with the table that it has."""
    native, cuda = (getattr(type(rotary), name, None) for name in ("forward_native", "forward_cuda"))
    dim = getattr(rotary, "rotary_dim", 0)
    return (
        getattr(native, "__qualname__", "") == _PLAIN_ROTATION
        and getattr(cuda, "__qualname__", "") in ("", _PLAIN_ROTATION_ON_CUDA)
        and isinstance(getattr(rotary, "cos_sin_cache", None), torch.Tensor)
        and not hasattr(rotary, "sin_cos_cache")
        and 0 < dim <= head_dim
        and dim % 2 == 0
    )


def rotates_in_float32(rotary: nn.Module) -> bool:
    """Whether a plain rotation rounds its result only.

    SGLang's kernel for heads of 64, 128, 256 and 512 values on CUDA does. Its kernel for others, and its operations for
    a CPU, compute in K's type with a table of that type.
    """
    method = getattr(getattr(rotary, "_forward_method", None), "__name__", "")
    return method == "forward_cuda" and not getattr(rotary, "use_fallback_kernel", True)
