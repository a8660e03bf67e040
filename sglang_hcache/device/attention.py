"""What an attention module of the served model does before it hands K and V over, read from the module itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_KNOWN_CHILDREN = frozenset(
    {"qkv_proj", "q_norm", "k_norm", "rotary_emb", "attn", "o_proj", "out_proj", "dense"}
)
"""Children of modules of the form that :class:`AttentionForm` describes. What else there is may do anything."""


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module, and what it hands over."""

    module: nn.Module
    core: str
    """Name of its child that takes Q, K and V."""
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the matrix that makes Q, K and V."""
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Attention of the form ``qkv_proj -> [clip] -> [k_norm] -> [rotary_emb]``, the query's share left out.

    Llama, Mistral, Phi-3, Gemma, StableLM and Mixtral rotate, Phi-2 only a part of each head; Qwen 1.5 and 2 have a
    bias as well, Qwen 3 a norm over each head of K, OLMo clips, OLMo 2 has a norm over all heads together. OPT
    does nothing after ``qkv_proj``: its positions are in the hidden states.
    """

    projection: nn.Module
    """Weight (q_size + 2 * kv_size, hidden_size): the rows of Q, of K, of V. Maybe a bias."""
    q_size: int
    kv_heads: int
    head_dim: int
    has_bias: bool
    clip: float | None
    """Q, K and V are cut to this size."""
    key_norm: nn.Module | None
    norm_size: int
    """Values that ``key_norm`` takes together: ``head_dim``, or K's whole row."""
    rotary: nn.Module | None

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


def describe(attention: Attention) -> AttentionForm | None:
    """The form of ``attention``; None if it is another one, or its weights are not a plain matrix.

    A description is what the module looks like, no proof: the self-check at start compares what comes out.
    """
    module = attention.module
    children = dict(module.named_children())
    projection, norm = children.get("qkv_proj"), children.get("k_norm")
    if projection is None or attention.core != "attn" or not children.keys() <= _KNOWN_CHILDREN:
        return None
    if not is_plain(projection, attention.qkv_rows):
        return None
    norm_size = attention.head_dim
    if norm is not None:
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
            return None
        norm_size = weight.numel()
        if norm_size not in (attention.head_dim, attention.kv_size):
            return None
    return AttentionForm(
        projection=projection,
        q_size=attention.q_size,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        has_bias=getattr(projection, "bias", None) is not None,
        clip=getattr(module, "clip_qkv", None),
        key_norm=norm,
        norm_size=norm_size,
        rotary=children.get("rotary_emb"),
    )


def is_plain(projection: nn.Module, rows: int) -> bool:
    """Whether a module multiplies with a matrix of ``rows`` rows: not quantised, not packed."""
    weight = getattr(projection, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.shape[0] == rows
        and weight.is_floating_point()
    )


def kv_weights(projection: nn.Module, q_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias without the query's rows.

    To be called at each use: updating the model's weights at run time replaces the tensors.
    """
    weight, bias = projection.weight, getattr(projection, "bias", None)
    assert isinstance(weight, torch.Tensor)
    return weight[q_size:], None if bias is None else bias[q_size:]
