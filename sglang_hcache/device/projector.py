"""Hidden states to K and V, with the model's own modules.

A layer's K and V are ``qkv_proj``'s last two blocks of rows applied to the hidden state, then the model's own
``k_norm`` where it has one, then its own rotary embedding for K [HCache §3.1]. Only the query's share of the
work is left out; no weight and no arithmetic is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from sglang_hcache.core.errors import ConfigError

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
            hidden: (n, hidden_size), the input of the layer's ``qkv_proj``, in the model's dtype.
            positions: (n,) int64, position of each row in its sequence.
        """

    def project_unrotated(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K before its rotation and V, each (n, kv_heads * head_dim)."""

    def rotation_table(self, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Cosines and sines by position, (positions, head_dim) of ``dtype``; None if K is rotated in another way.

        The plain rotation pairs the halves of a head. What scaling of positions there is, the table has it.
        """


class AttentionModule(Protocol):
    """What a Llama-like attention module offers (SGLang's Llama, Mistral, Qwen2 and Qwen3)."""

    qkv_proj: nn.Module
    rotary_emb: nn.Module
    q_size: int
    kv_size: int
    num_kv_heads: int
    head_dim: int


class LlamaFamilyProjector:
    """Projector for attention of the form ``qkv_proj -> [k_norm] -> rotary_emb``.

    Args:
        attention: the attention module of every layer, in order.

    Raises:
        ConfigError: a layer's ``qkv_proj`` is not a plain matrix of the expected shape (quantised, packed).
    """

    def __init__(self, attention: Sequence[AttentionModule]) -> None:
        self._layers = list(attention)
        for index, layer in enumerate(self._layers):
            weight = getattr(layer.qkv_proj, "weight", None)
            rows = layer.q_size + 2 * layer.kv_size
            if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[0] != rows:
                shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
                raise ConfigError(
                    f"--hierarchical-cache hcache: qkv_proj of layer {index} is {shape}, expected a plain "
                    f"matrix of {rows} rows; quantised or packed weights are not supported"
                )

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._layers[layer]
        key, value = self.project_unrotated(layer, hidden)
        # The rotary module wants a query as well; one head of it is the least it takes.
        query = key.new_zeros(key.shape[0], module.head_dim)
        _, key = module.rotary_emb(positions, query, key.contiguous())
        shape = (-1, module.num_kv_heads, module.head_dim)
        return key.reshape(shape), value.reshape(shape)

    def project_unrotated(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._layers[layer]
        weight, bias = self._kv_rows(module)
        key, value = nn.functional.linear(hidden, weight, bias).chunk(2, dim=-1)
        key_norm = getattr(module, "k_norm", None)
        if key_norm is not None:
            key = key_norm(key.reshape(-1, module.head_dim)).view(-1, module.kv_size)
        return key, value

    def rotation_table(self, layer: int, dtype: torch.dtype) -> torch.Tensor | None:
        module = self._layers[layer]
        rotary, table = module.rotary_emb, getattr(module.rotary_emb, "cos_sin_cache", None)
        native = getattr(type(rotary), "forward_native", None)
        is_plain = getattr(native, "__qualname__", "") == _PLAIN_ROTATION
        covers_head = getattr(rotary, "rotary_dim", 0) == module.head_dim and module.head_dim % 2 == 0
        if not (is_plain and covers_head and getattr(rotary, "is_neox_style", False)):
            return None
        if not isinstance(table, torch.Tensor) or hasattr(rotary, "sin_cos_cache"):
            return None
        return table.to(dtype).contiguous()

    @staticmethod
    def _kv_rows(module: AttentionModule) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Looked up at each use: updating the model's weights at run time replaces the tensors.
        weight, bias = module.qkv_proj.weight, getattr(module.qkv_proj, "bias", None)
        assert isinstance(weight, torch.Tensor)
        return weight[module.q_size :], None if bias is None else bias[module.q_size :]


class KVPool(Protocol):
    """Where K and V are: the paged pool."""

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows (n, kv_heads, head_dim) at ``slots`` (n,) int64 of ``layer``."""

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of K and V, each (slots, kv_heads, head_dim), contiguous."""

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``slots`` (n,) int64 of ``layer``, copies, each (n, kv_heads, head_dim)."""
