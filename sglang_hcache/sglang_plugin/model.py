"""What the tier needs to know of the served model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_hcache.core.config import RestoreMethod
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.device.fingerprint import weights_fingerprint
from sglang_hcache.device.projector import AttentionModule, LlamaFamilyProjector

SUPPORTED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)

OnLayer = Callable[[int, torch.Tensor], None]
"""Receives a layer's index and the input of its ``qkv_proj``, (rows, hidden_size)."""


@dataclass(frozen=True)
class ServedModel:
    """A loaded model of the Llama family."""

    module: nn.Module
    attention: tuple[AttentionModule, ...]
    architecture: str
    hidden_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    config: str
    """The model's configuration, canonical JSON, without names and paths."""
    method: Method
    """What is stored of every layer."""

    @classmethod
    def of(cls, module: nn.Module, model_config: Any, method: RestoreMethod) -> ServedModel:
        """Describe SGLang's ``module``.

        Raises:
            ConfigError: not a model whose K and V we know how to project.
        """
        architecture = type(module).__name__
        if architecture not in SUPPORTED_ARCHITECTURES:
            known = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
            raise ConfigError(
                f"--hierarchical-cache hcache does not support {architecture}; supported: {known}"
            )
        inner: Any = module.model
        attention = tuple(layer.self_attn for layer in inner.layers)
        kv_heads, head_dim = attention[0].num_kv_heads, attention[0].head_dim
        return cls(
            module=module,
            attention=attention,
            architecture=architecture,
            hidden_size=model_config.hidden_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=model_config.dtype,
            config=_canonical(model_config.hf_config),
            method=_chosen(method, model_config.hidden_size, 2 * kv_heads * head_dim),
        )

    @property
    def layout(self) -> StateLayout:
        """What is stored of a token."""
        layers, size = len(self.attention), self.dtype.itemsize
        if self.method is Method.KV:
            return StateLayout.all_kv(layers, self.kv_heads, self.head_dim, size)
        return StateLayout.all_hidden(layers, self.hidden_size, size)

    def projector(self) -> LlamaFamilyProjector | None:
        """Makes K and V of hidden states; None if none are stored."""
        return LlamaFamilyProjector(self.attention) if self.method is Method.HIDDEN else None

    def namespace(self) -> Namespace:
        """Namespace of the weights that are loaded now, for requests without a tenant. Reads all weights."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        weights = weights_fingerprint(tensors)
        layout = f"{self.architecture}|{self.dtype}|{self.layout}|tp1|pp1|{self.config}"
        return Namespace(model=weights, layout=layout)

    def watch(self, on_layer: OnLayer) -> list[torch.utils.hooks.RemovableHandle]:
        """Call ``on_layer`` with the input of every ``qkv_proj`` from now on."""
        return [
            layer.qkv_proj.register_forward_pre_hook(_pre_hook(index, on_layer))
            for index, layer in enumerate(self.attention)
        ]


def _chosen(method: RestoreMethod, hidden: int, kv: int) -> Method:
    """``auto`` takes what is smaller; where K and V are no larger they win, for they need no projection."""
    if method is RestoreMethod.AUTO:
        return Method.HIDDEN if hidden < kv else Method.KV
    return Method(method.value)


def _pre_hook(index: int, on_layer: OnLayer) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        on_layer(index, inputs[0])

    return hook


def _canonical(hf_config: Any) -> str:
    settings = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return json.dumps(settings, sort_keys=True, default=str)
