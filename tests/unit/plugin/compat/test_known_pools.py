"""Whose state is K and V of each token in a plain pool, by SGLang's own classes: all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import _check_pools

SHAPE = ModelShape(
    name="x", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_size=4,
    ffn=FFNKind.GATED, ffn_size=8,
)  # fmt: skip
RIGHT = {
    "kv_cache_layout": "nhd",
    "quant_method": object.__new__(UnquantizedKVCacheMethod),
    "dtype": torch.float32,
    "start_layer": 0,
    "layer_num": 2,
    "head_num": 1,
    "head_dim": 4,
    "v_head_dim": 4,
}


class OtherPool(MHATokenToKVPool):
    """Which may keep something else in its slots."""


class OtherTable(ReqToTokenPool):
    """As those of models with more state for each request."""


def check(pool: type = MHATokenToKVPool, table: type = ReqToTokenPool, **changes: Any) -> None:
    made = object.__new__(pool)
    vars(made).update(RIGHT | changes)
    _check_pools(made, object.__new__(table), SHAPE, (torch.float32, torch.float8_e4m3fn))


def test_a_plain_pool_of_the_models_sizes_is_accepted() -> None:
    check()
    check(dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"pool": OtherPool}, "its KV pool is a OtherPool, not"),
        ({"kv_cache_layout": "vectorized_5d"}, "its KV pool has the layout vectorized_5d, not nhd"),
        ({"quant_method": object()}, "its KV pool quantises K and V"),
        ({"table": OtherTable}, r"its requests keep more than K and V \(OtherTable\)"),
        ({"dtype": torch.float64}, "keeps torch.float64, not torch.float32 or torch.float8_e4m3fn"),
        ({"layer_num": 1}, "1 of its 2 layers keep K and V"),
        ({"start_layer": 1}, "layers keep K and V"),
        (
            {"head_num": 2},
            "its pool has 2 heads of 4 and 4 values for K and V, not 1 of 4 as its configuration says",
        ),
        ({"head_dim": 8}, "its pool has 1 heads of 8 and 4 values"),
        ({"v_head_dim": 8}, "its pool has 1 heads of 4 and 8 values"),
    ],
)
def test_all_others_are_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        check(**changes)
