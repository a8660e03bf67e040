"""What a small random model is made of: sizes, and the families that there are. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hcache.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """A family's classes in transformers, and what its configuration says besides the sizes that all have."""

    prefix: str
    """What the names of its classes begin with."""
    more: Mapping[str, Any] = field(default_factory=dict)
    ffn: str = "intermediate_size"
    """What the width of the feed forward network is called."""
    shares_kv_heads: bool = True
    """Whether SGLang serves it with fewer KV heads than heads."""


_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", {"sliding_window": None}),
    "qwen1.5": Family("Qwen2", shares_kv_heads=False),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "opt": Family("OPT", ffn="ffn_dim", shares_kv_heads=False),
    "gemma": Family("Gemma", {"tie_word_embeddings": True}),
    # SGLang reads hidden_act, which published configurations have and transformers does not write.
    "gemma2": Family("Gemma2", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "phi": Family("Phi", {"partial_rotary_factor": 0.5}, shares_kv_heads=False),
    "phi3": Family("Phi3", {"partial_rotary_factor": 0.75}),
    "olmo": Family("Olmo", {"clip_qkv": 4.0}, shares_kv_heads=False),
    "olmo2": Family("Olmo2"),
    "stablelm": Family("StableLm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen2_moe": Family("Qwen2Moe", {"num_experts": 4, "decoder_sparse_step": 1, **_EXPERTS}),
    "gpt2": Family("GPT2", {"tie_word_embeddings": True}, ffn="n_inner", shares_kv_heads=False),
}
"""Name -> family."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to write. Two equal ones give the same files, on one kind of device.

    Raises:
        ConfigError: sizes that do not fit together, or an unknown dtype; in the words of the benchmarks' flags.
    """

    family: str = "llama"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int | None = None
    """As many as ``heads`` if None: multi-head attention."""
    vocab: int = 512
    """At least 320: bytes, special tokens and enough merges that some tokens are whole words."""
    dtype: str = "float32"
    max_position: int = 8192
    seed: int = 0
    initializer_range: float = 0.15
    """Much above the usual 0.02, with which logits are almost uniform and wrong keys go unnoticed."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: {self.dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"--hidden: {self.hidden} is not a multiple of 2 * --heads = {2 * self.heads}")
        if self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            raise ConfigError(f"--kv-heads: {self.kv_heads} does not divide --heads {self.heads}")

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads
