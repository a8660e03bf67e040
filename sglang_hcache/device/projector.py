"""Hidden states to K and V, with the model's own modules.

A layer's K and V are ``qkv_proj``'s last two blocks of rows applied to the hidden state, then what the model itself
does to K before attention [HCache §3.1]. Only the query's share of the work is left out; no weight is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from sglang_hcache.device.attention import AttentionForm, kv_weights
from sglang_hcache.device.key_steps import (
    KeySteps,
    Rotation,
    is_plain_rotation,
    plain_norm,
    rotates_in_float32,
)


class Projector(Protocol):
    """Rebuilds K and V of one layer."""

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each (n, kv_heads, head_dim).

        Args:
            layer: index of the layer.
            hidden: (n, hidden_size), the input of the layer's attention, in the model's dtype.
            positions: (n,) int64, position of each row in its sequence.
        """


@runtime_checkable
class UnfinishedProjector(Projector, Protocol):
    """One that can leave what follows the matrix product to somebody else."""

    def key_steps(self, layer: int, dtype: torch.dtype, *, with_norm: bool) -> KeySteps | None:
        """What remains to be done to K of ``dtype`` after :meth:`project_unrotated`; None if it cannot be said.

        Args:
            with_norm: a norm counts among it, where it can be said.
        """

    def project_unrotated(
        self, layer: int, hidden: torch.Tensor, out: torch.Tensor | None = None, *, leave_norm: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K before its rotation and V, each (n, kv_heads * head_dim).

        Args:
            out: (n, 2 * kv_heads * head_dim) of the model's dtype, contiguous, overwritten; new memory if None.
            leave_norm: K before its norm as well, because it is among the steps.
        """


class DescribedProjector:
    """Projector for attention that :class:`AttentionForm` describes.

    Args:
        forms: of every layer's attention, in order.
    """

    def __init__(self, forms: Sequence[AttentionForm]) -> None:
        self.forms = tuple(forms)
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.forms[layer]
        key, value = self.project_unrotated(layer, hidden)
        if form.rotary is not None:
            # The rotary module wants a query as well. One head is enough, but for kernels: those of a GPU may want a
            # multiple of K's heads.
            heads = 1 if key.device.type == "cpu" else form.kv_heads
            query = key.new_zeros(key.shape[0], heads * form.head_dim)
            _, key = form.rotary(positions, query, key.contiguous())
        shape = (-1, form.kv_heads, form.head_dim)
        return key.reshape(shape), value.reshape(shape)

    def project_unrotated(
        self, layer: int, hidden: torch.Tensor, out: torch.Tensor | None = None, *, leave_norm: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.forms[layer]
        weight, bias = kv_weights(form.projection, form.q_size)
        both = _linear(hidden, weight, bias if form.has_bias else None, out)
        if form.clip is not None:
            both.clamp_(min=-form.clip, max=form.clip)
        key, value = both.chunk(2, dim=-1)
        if form.key_norm is not None and not leave_norm:
            key = form.key_norm(key.reshape(-1, form.norm_size)).view(-1, form.kv_size)
        return key, value

    def key_steps(self, layer: int, dtype: torch.dtype, *, with_norm: bool) -> KeySteps | None:
        form, rotary, norm, rotation = self.forms[layer], self.forms[layer].rotary, None, None
        if with_norm and form.key_norm is not None:
            norm = plain_norm(form.key_norm, dtype)
        if rotary is not None:
            if not is_plain_rotation(rotary, form.head_dim):
                return None
            in_float32 = rotates_in_float32(rotary)
            table = self._converted(rotary, torch.float32 if in_float32 else dtype)
            is_halves = bool(getattr(rotary, "is_neox_style", False))
            rotation = Rotation(table, is_halves, rounds_products=not in_float32)
        return KeySteps(norm, rotation)

    def _converted(self, rotary: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """The table of the layers that share ``rotary``, until the model gets another one."""
        table = rotary.cos_sin_cache
        assert isinstance(table, torch.Tensor)
        source, converted = self._tables.get(id(rotary), (None, table))
        if source is not table or converted.dtype != dtype:
            converted = table.to(dtype).contiguous()
            self._tables[id(rotary)] = (table, converted)
        return converted


def _linear(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """``nn.functional.linear``, which takes no ``out``, by the operations that it calls itself."""
    if out is None:
        return nn.functional.linear(hidden, weight, bias)
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


class KVPool(Protocol):
    """Where K and V are: the paged pool."""

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows (n, kv_heads, head_dim) at ``slots`` (n,) int64 of ``layer``."""

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of K and V, each (slots, kv_heads, head_dim), contiguous."""

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``slots`` (n,) int64 of ``layer``, copies, each (n, kv_heads, head_dim)."""
