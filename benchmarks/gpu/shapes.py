"""Sizes of published models. No weights: the numbers in them are random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What a layer's K and V are made of, and the configuration that Hugging Face's format has for the whole model."""

    name: str
    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotates: bool
    norms_heads: bool
    config: dict[str, Any]

    @property
    def width(self) -> int:
        """Values of a token's K in one layer."""
        return self.kv_heads * self.head_dim


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


_OPT_30B = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "num_hidden_layers": 48,
    "hidden_size": 7168,
    "word_embed_proj_dim": 7168,
    "num_attention_heads": 56,
    "ffn_dim": 28672,
    "vocab_size": 50272,
    "max_position_embeddings": 8192,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

SHAPES = (
    Shape("llama-2-7b", 32, 4096, 32, 32, 128, True, False, _llama(32, 4096, 32, 11008)),
    Shape("llama-2-13b", 40, 5120, 40, 40, 128, True, False, _llama(40, 5120, 40, 13824)),
    Shape("opt-30b", 48, 7168, 56, 56, 128, False, False, _OPT_30B),
    Shape(
        "llama-3-8b", 32, 4096, 32, 8, 128, True, False,
        _llama(32, 4096, 32, 14336, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0),
    ),
    Shape(
        "qwen3-8b", 36, 4096, 32, 8, 128, True, True,
        _llama(
            36, 4096, 32, 12288, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_key_value_heads=8,
            head_dim=128, vocab_size=151936, rope_theta=1000000.0, rms_norm_eps=1e-6,
        ),
    ),
    Shape(
        "gemma-7b", 28, 3072, 16, 16, 256, True, False,
        _llama(
            28, 3072, 16, 24576, architectures=["GemmaForCausalLM"], model_type="gemma", head_dim=256,
            vocab_size=256000, rms_norm_eps=1e-6, hidden_act="gelu", hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
    ),
)  # fmt: skip


def shape_named(name: str) -> Shape:
    return next(shape for shape in SHAPES if shape.name == name)
