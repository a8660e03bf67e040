"""What each layer stores, from what a server says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.cli.chat.layers import UnknownLayersError, stored_layers
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.plan.planner import Split

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6,
    "intermediate_size": 128, "dtype": "float32",
}  # fmt: skip


def info(
    folder: Path, chunk_bytes: int, *, dtype: str = "float32", method: str = "auto", **changes: Any
) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return {
        "model_path": str(folder),
        "dtype": dtype,
        "hicache_storage_backend_extra_config": json.dumps({"method": method}),
        "internal_states": [{"hcache": {"host": {"chunk_bytes": chunk_bytes}}}],
    }


@pytest.mark.parametrize("num_kv", range(7))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "half"])
def test_the_size_of_a_chunk_tells(tmp_path: Path, num_kv: int, dtype: str) -> None:
    size = 4 if dtype == "float32" else 2
    methods = Split(0, 6 - num_kv, num_kv).methods()
    layout = StateLayout.of(methods, 64 * size, 2 * 64 * size)
    assert stored_layers(info(tmp_path, layout.chunk_bytes, dtype=dtype)) == methods


@pytest.mark.parametrize("config_dtype", ["float32", "bfloat16"])
def test_dtype_auto_is_as_sglang_serves_it(tmp_path: Path, config_dtype: str) -> None:
    layout = StateLayout.all_kv(6, 4, 16, 2)  # float32 is served as float16
    state = info(tmp_path, layout.chunk_bytes) | {"dtype": "auto"}
    config = CONFIG | {"dtype": config_dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_layers(state) == (Method.KV,) * 6


def test_grouped_queries(tmp_path: Path) -> None:
    layout = StateLayout.all_kv(6, 1, 16, 4)
    assert stored_layers(info(tmp_path, layout.chunk_bytes, num_key_value_heads=1)) == (Method.KV,) * 6


def test_method_recompute_stores_nothing(tmp_path: Path) -> None:
    assert stored_layers(info(tmp_path, 0, method="recompute")) == (Method.RECOMPUTE,) * 6


@pytest.mark.parametrize(
    ("chunk_bytes", "changes", "said"),
    [
        (64 * 100, {}, "do not fit"),
        (64 * 6 * 64 * 16, {}, "do not fit"),
        (64 * 6 * 64 * 4, {"num_key_value_heads": 2}, "as large as"),
        (64, {"model_type": "magic"}, "not known"),
    ],
)
def test_what_cannot_be_told(tmp_path: Path, chunk_bytes: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownLayersError, match=said):
        stored_layers(info(tmp_path, chunk_bytes, **changes))


def test_a_model_on_another_machine(tmp_path: Path) -> None:
    state = info(tmp_path, 64) | {"model_path": "someone/model"}
    with pytest.raises(UnknownLayersError, match="someone/model"):
        stored_layers(state)
