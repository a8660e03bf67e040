"""The sizes of a model that decide what a restore costs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

MAX_PLANNED_LAYERS = 1024
"""The search tries all mixes, whose number grows with the square of that of layers."""
MAX_SIZE = 10**7
"""Of anything else: products of a few of them are still numbers that can be calculated with."""


class FFNKind(StrEnum):
    """What the feed forward network of a layer is made of. Values stand in profiles: never rename one."""

    PLAIN = "plain"
    """Two matrices, up and down (OPT, GPT-NeoX)."""
    GATED = "gated"
    """Three matrices, gate, up and down (Llama, Mistral, Qwen, Gemma)."""

    @property
    def num_matrices(self) -> int:
        return 2 if self is FFNKind.PLAIN else 3


DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Name of an element type -> its bytes."""

FP8_CACHES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""SGLang's ``--kv-cache-dtype`` for K and V of one byte a value -> torch's name of their type."""

FFN_KINDS = {
    "opt": FFNKind.PLAIN,
    "gpt_neox": FFNKind.PLAIN,
    "llama": FFNKind.GATED,
    "mistral": FFNKind.GATED,
    "qwen2": FFNKind.GATED,
    "qwen3": FFNKind.GATED,
    "gemma": FFNKind.GATED,
    "gemma2": FFNKind.GATED,
    "phi": FFNKind.PLAIN,
    "phi3": FFNKind.GATED,
    "olmo": FFNKind.GATED,
    "olmo2": FFNKind.GATED,
    "stablelm": FFNKind.GATED,
    "mixtral": FFNKind.GATED,
    "qwen2_moe": FFNKind.GATED,
}
"""``model_type`` of a configuration that we can read -> its feed forward network."""


def printable(text: str) -> str:
    """``text`` with what a terminal would obey, or could not show, written as an escape."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder whose layers are all alike.

    Raises:
        ValueError: a size is not a positive number, or too large; the heads do not share KV heads evenly; or the name
            is not a printable text.
    """

    name: str
    num_layers: int
    hidden_size: int
    """Values of one hidden state: D in [HCache §3.2]."""
    num_heads: int
    num_kv_heads: int
    """As many as ``num_heads``: multi-head attention (MHA). Fewer: grouped-query attention (GQA)."""
    head_size: int
    ffn: FFNKind
    ffn_size: int
    """Width of the feed forward network, values; with experts: of those together that one token goes through."""
    hidden_dtype_bytes: int = 2
    """Bytes of one value of a stored hidden state."""
    kv_dtype_bytes: int = 2
    """Bytes of one value of K or V in the KV pool and in a tier."""

    def __post_init__(self) -> None:
        for field in _SIZE_FIELDS:
            _check_size(
                field, getattr(self, field), MAX_PLANNED_LAYERS if field == "num_layers" else MAX_SIZE
            )
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():
            raise ValueError(f"name must be a printable text that is not empty, got {self.name!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")

    @property
    def attention_size(self) -> int:
        """Values of one token's query, and of what attention returns: ``num_heads * head_size``."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Values of one token's K, and of its V: ``num_kv_heads * head_size``."""
        return self.num_kv_heads * self.head_size

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of one token's hidden state in one layer."""
        return self.hidden_size * self.hidden_dtype_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one token's K and V together in one layer."""
        return 2 * self.kv_size * self.kv_dtype_bytes

    def with_fp8_cache(self) -> ModelShape:
        """The same model with K and V of one byte a value, in the pool and in a tier."""
        return replace(self, kv_dtype_bytes=1)

    def with_dtype(self, dtype: str) -> ModelShape:
        """The same model with hidden states, K and V of ``dtype``, a key of :data:`DTYPE_BYTES`.

        Raises:
            ValueError: an unknown dtype.
        """
        size = _dtype_bytes(dtype)
        return replace(self, hidden_dtype_bytes=size, kv_dtype_bytes=size)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str, dtype: str | None = None) -> ModelShape:
        """The shape that a Hugging Face ``config.json`` describes.

        Args:
            config: the file's object.
            name: what to call the model.
            dtype: element type of hidden states, K and V; None: what SGLang computes in unless it is told.

        Raises:
            ValueError: an architecture whose costs we do not know (MLA, sliding windows, an
                unknown ``model_type``), or a key that is missing or wrong.
        """
        model_type = _refuse_unknown(config)
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_heads} heads")
        size = _dtype_bytes(dtype or _served_dtype(config))
        return cls(
            name=printable(name),
            num_layers=_size(config, "num_hidden_layers", most=MAX_PLANNED_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_size=_size(config, "head_dim", hidden_size // num_heads),
            ffn=FFN_KINDS[model_type],
            ffn_size=_ffn_size(config, model_type),
            hidden_dtype_bytes=size,
            kv_dtype_bytes=size,
        )


_SIZE_FIELDS = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size"),
    *("hidden_dtype_bytes", "kv_dtype_bytes"),
)


def _refuse_unknown(config: Mapping[str, Any]) -> str:
    """The configuration's ``model_type``, if we know what its layers compute."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FFN_KINDS:
        known = ", ".join(sorted(FFN_KINDS))
        raise ValueError(f"model_type {reprlib.repr(model_type)} is not known; known: {known}")
    # Qwen names a window that it does not use, of no tokens for instance.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ValueError(f"sliding_window {config['sliding_window']!r}: windows are not planned for")
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise ValueError(f"layer_types must be a list, got {reprlib.repr(layer_types)}")
    odd_layers = sorted({reprlib.repr(kind) for kind in layer_types or () if kind != "full_attention"})
    if odd_layers:
        raise ValueError(f"layer_types {', '.join(odd_layers)}: all layers must be full_attention")
    return model_type


def _ffn_size(config: Mapping[str, Any], model_type: str) -> int:
    """Width of the feed forward network; of all experts together that one token goes through."""
    if model_type == "mixtral":
        return _size(config, "num_experts_per_tok") * _size(config, "intermediate_size")
    if model_type == "qwen2_moe":
        routed = _size(config, "num_experts_per_tok") * _size(config, "moe_intermediate_size")
        shared = config.get("shared_expert_intermediate_size")
        return routed + (_size(config, "shared_expert_intermediate_size") if shared else 0)
    return _size(config, "ffn_dim" if model_type == "opt" else "intermediate_size")


def _size(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    return _check_size(key, value, most)


def _check_size(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} must be a positive whole number up to {most:,}, got {reprlib.repr(value)}")
    return value


def _served_dtype(config: Mapping[str, Any]) -> str:
    """SGLang's default: the one that the file names, but 16 bits for float32, or for none."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "float16" if named == "float32" else named


def _dtype_bytes(dtype: Any) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not allowed; allowed: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _gated(name: str, layers: int, hidden: int, heads: int, kv_heads: int, head: int, ffn: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        ffn=FFNKind.GATED,
        ffn_size=ffn,
    )


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn=FFNKind.PLAIN,
        ffn_size=4 * hidden,
    )


# From the config.json that each model was published with; 2-byte states (float16 or bfloat16).
NAMED_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gated("llama2-7b", 32, 4096, 32, 32, 128, 11008),
        _gated("llama2-13b", 40, 5120, 40, 40, 128, 13824),
        _gated("llama2-70b", 80, 8192, 64, 8, 128, 28672),
        _gated("llama3-8b", 32, 4096, 32, 8, 128, 14336),
        _gated("llama3-70b", 80, 8192, 64, 8, 128, 28672),
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-30b", 48, 7168, 56),
        _gated("qwen1.5-7b", 32, 4096, 32, 32, 128, 11008),
        _gated("qwen2-7b", 28, 3584, 28, 4, 128, 18944),
        _gated("qwen3-8b", 36, 4096, 32, 8, 128, 12288),
        _gated("mistral-7b-v0.3", 32, 4096, 32, 8, 128, 14336),
        _gated("gemma-7b", 28, 3072, 16, 16, 256, 24576),
    )
}
"""Name -> shape of models that need no file."""
