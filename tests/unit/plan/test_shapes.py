"""Model sizes, from names and from configurations."""

from __future__ import annotations

import pytest

from sglang_hcache.plan.shapes import NAMED_SHAPES, ModelShape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "torch_dtype": "bfloat16",
}
"""The fields of Llama 3 8B that matter."""


def test_config_of_a_published_model_gives_its_named_shape():
    assert ModelShape.from_config(LLAMA, "llama3-8b") == NAMED_SHAPES["llama3-8b"]
    opt = {
        "model_type": "opt",
        "num_hidden_layers": 48,
        "hidden_size": 7168,
        "num_attention_heads": 56,
        "ffn_dim": 28672,
        "torch_dtype": "float16",
    }
    assert ModelShape.from_config(opt, "opt-30b") == NAMED_SHAPES["opt-30b"]
    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "torch_dtype": "bfloat16",
    }
    assert ModelShape.from_config(gemma, "gemma-7b") == NAMED_SHAPES["gemma-7b"]


@pytest.mark.parametrize("shape", NAMED_SHAPES.values(), ids=lambda shape: shape.name)
def test_named_shapes_are_of_their_size(shape):
    """Layers alone make 0.75 to 1.02 of the parameters that the name promises; the rest are embeddings."""
    matrices = 2 * shape.hidden_size * (shape.attention_size + shape.kv_size)
    matrices += shape.ffn.num_matrices * shape.hidden_size * shape.ffn_size
    promised = float(shape.name.partition("-")[2].split("b")[0]) * 1e9
    assert 0.75 < shape.num_layers * matrices / promised < 1.12, shape


def test_bytes_of_a_row():
    gqa = NAMED_SHAPES["llama3-8b"]
    assert (gqa.hidden_row_bytes, gqa.kv_row_bytes) == (8192, 4096)
    mha = NAMED_SHAPES["llama2-7b"]
    assert mha.kv_row_bytes == 2 * mha.hidden_row_bytes
    wide_heads = NAMED_SHAPES["gemma-7b"]
    assert (wide_heads.hidden_row_bytes, wide_heads.kv_row_bytes) == (6144, 16384)
    assert mha.with_dtype("float32").hidden_row_bytes == 16384


def test_an_odd_name_is_written_so_that_a_terminal_shows_it():
    assert ModelShape.from_config(LLAMA, "a\x1b[31m\udcffä b").name == r"a\x1b[31m\udcffä b"


def test_dtype_of_the_caller_wins():
    assert ModelShape.from_config(LLAMA, "m", "float32").kv_dtype_bytes == 4


@pytest.mark.parametrize("named", [{}, {"dtype": "float32"}, {"dtype": None, "torch_dtype": "float32"}])
def test_dtype_of_a_server_that_is_told_none(named):
    """As SGLang has it."""
    from sglang.srt.configs.model_config import _get_and_verify_dtype

    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | named
    assert _get_and_verify_dtype(config, "auto").itemsize == 2
    assert ModelShape.from_config(config, "m").hidden_dtype_bytes == 2


def test_of_experts_those_count_that_a_token_goes_through():
    mixtral = LLAMA | {"model_type": "mixtral", "num_experts_per_tok": 2, "sliding_window": None}
    assert ModelShape.from_config(mixtral, "m").ffn_size == 2 * 14336
    qwen = LLAMA | {
        "model_type": "qwen2_moe",
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 0,
    }
    assert ModelShape.from_config(qwen, "m").ffn_size == 4 * 1408 + 5632


def test_a_window_that_is_not_used_is_none():
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
    assert ModelShape.from_config(qwen, "m").num_layers == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "dbrx"}, "model_type 'dbrx' is not known"),
        ({"model_type": "deepseek_v2"}, "known: gemma, gemma2, gpt_neox, llama"),
        ({"sliding_window": 4096}, "windows are not planned for"),
        *(({"model_type": value}, "model_type .* is not known") for value in (["llama"], {}, None, 5)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention': all"),
        ({"layer_types": ["x", 1, "x"]}, "layer_types 'x', 1: all layers must be full_attention"),
        ({"layer_types": [{}]}, "layer_types {}: all layers"),
        *(({"layer_types": value}, "layer_types must be a list") for value in (5, {}, "full_attention")),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive whole number"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers must be .* up to 1,024, got 100000"),
        ({"hidden_size": "4096"}, "hidden_size must be"),
        ({"hidden_size": 2**30}, "hidden_size must be .* up to 10,000,000"),
        ({"intermediate_size": 10**400}, r"intermediate_size must be .* got 10+\.\.\."),
        ({"num_key_value_heads": 5}, "does not divide"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "not a multiple of 33 heads"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not allowed; allowed: float32, float16, bfloat16"),
    ],
)
def test_refuses_what_it_does_not_know(change, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(LLAMA | change, "m")
