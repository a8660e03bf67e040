"""Hidden states to K and V, with the model's own modules.

A layer's K and V are ``qkv_proj``'s last two blocks of rows applied to the hidden state, then what the model itself
does to K before attention [HCache §3.1]. Only the query's share of the work is left out; no weight and no arithmetic
is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from sglang_hcache.device.attention import AttentionForm, kv_rows

_PLAIN_ROTATION = "RotaryEmbedding.forward_native"
"""SGLang's implementation of the rotation that ``KVRows`` knows; variants with one of their own are left to it."""


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
class UnrotatedProjector(Projector, Protocol):
    """One that can leave the rotation of K to somebody else."""

    def project_unrotated(
        self, layer: int, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K before its rotation and V, each (n, kv_heads * head_dim).

        Args:
            out: (n, 2 * kv_heads * head_dim) of the model's dtype, contiguous, overwritten; new memory if None.
        """

    def rotation_table(self, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Cosines and sines by position, (positions, head_dim) of ``dtype``; None if K is rotated in another way.

        The plain rotation pairs the halves of a head. What scaling of positions there is, the table has it.
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
            # The rotary module wants a query as well; one head of it is the least it takes.
            query = key.new_zeros(key.shape[0], form.head_dim)
            _, key = form.rotary(positions, query, key.contiguous())
        shape = (-1, form.kv_heads, form.head_dim)
        return key.reshape(shape), value.reshape(shape)

    def project_unrotated(
        self, layer: int, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.forms[layer]
        weight, bias = kv_rows(form.projection, form.q_size)
        both = _linear(hidden, weight, bias if form.has_bias else None, out)
        if form.clip is not None:
            both.clamp_(min=-form.clip, max=form.clip)
        key, value = both.chunk(2, dim=-1)
        if form.key_norm is not None:
            key = form.key_norm(key.reshape(-1, form.norm_size)).view(-1, form.kv_size)
        return key, value

    def rotation_table(self, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
        form = self.forms[layer]
        rotary, table = form.rotary, getattr(form.rotary, "cos_sin_cache", None)
        native = getattr(type(rotary), "forward_native", None)
        is_plain = getattr(native, "__qualname__", "") == _PLAIN_ROTATION
        covers_head = getattr(rotary, "rotary_dim", 0) == form.head_dim and form.head_dim % 2 == 0
        if not (is_plain and covers_head and getattr(rotary, "is_neox_style", False)):
            return None
        if not isinstance(table, torch.Tensor) or hasattr(rotary, "sin_cos_cache"):
            return None
        assert rotary is not None
        return self._converted(rotary, table, dtype)

    def _converted(self, rotary: nn.Module, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``table`` of the layers that share ``rotary``, until the model gets another one."""
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
