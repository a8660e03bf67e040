"""What the tier needs to know of the served model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.device.fingerprint import weights_fingerprint
from sglang_hcache.device.projector import AttentionModule, LlamaFamilyProjector
from sglang_hcache.plan.shapes import ModelShape

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
    shape: ModelShape
    dtype: torch.dtype
    config: str
    """The model's configuration, canonical JSON, without names and paths."""

    @classmethod
    def of(cls, module: nn.Module, model_config: Any) -> ServedModel:
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
        return cls(
            module=module,
            attention=tuple(layer.self_attn for layer in inner.layers),
            architecture=architecture,
            shape=shape_of(model_config),
            dtype=model_config.dtype,
            config=_canonical(model_config.hf_config),
        )

    @property
    def vocabulary(self) -> int:
        """Number of tokens the model knows."""
        return int(self.module.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def row_bytes(self, method: Method) -> int:
        """Bytes of what one layer stores of a token."""
        return self.shape.kv_row_bytes if method is Method.KV else self.shape.hidden_row_bytes

    def layout(self, methods: Sequence[Method]) -> StateLayout:
        """What is stored of a token, with a method for each layer."""
        return StateLayout.of(methods, self.shape.hidden_row_bytes, self.shape.kv_row_bytes)

    def projector(self) -> LlamaFamilyProjector:
        """Makes K and V of hidden states."""
        return LlamaFamilyProjector(self.attention)

    def weights(self) -> bytes:
        """Fingerprint of the weights that are loaded now. Reads all of them."""
        return weights_fingerprint([*self.module.named_parameters(), *self.module.named_buffers()])

    def namespace(self, layout: StateLayout) -> Namespace:
        """Namespace of the weights that are loaded now, for requests without a tenant. Reads all weights."""
        text = f"{self.architecture}|{self.dtype}|{layout}|tp1|pp1|{self.config}"
        return Namespace(model=self.weights(), layout=text)

    def watch(self, layers: Iterable[int], on_layer: OnLayer) -> list[torch.utils.hooks.RemovableHandle]:
        """Call ``on_layer`` with the input of the ``qkv_proj`` of each of ``layers`` from now on."""
        return [
            self.attention[layer].qkv_proj.register_forward_pre_hook(_pre_hook(layer, on_layer))
            for layer in layers
        ]


def shape_of(model_config: Any) -> ModelShape:
    """Sizes of a model, from SGLang's ``ModelConfig``.

    Raises:
        ConfigError: sizes that we cannot read.
    """
    name = Path(model_config.model_path).name or "model"
    dtype = str(model_config.dtype).removeprefix("torch.")
    try:
        return ModelShape.from_config(model_config.hf_config.to_dict(), name, dtype)
    except ValueError as error:
        raise ConfigError(f"--hierarchical-cache hcache cannot use the model {name}: {error}") from None


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
