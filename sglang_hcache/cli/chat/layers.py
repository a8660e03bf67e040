"""What each layer stores, worked out from what a server says of itself.

``/server_info`` gives the size of a chunk, not what the layers store. Layers with K and V come before those with hidden
states (``Split.methods``), so the size says how many there are of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.plan.planner import Split
from sglang_hcache.plan.shapes import ModelShape


class UnknownLayersError(HCacheError):
    """It cannot be worked out. The message says why."""


def stored_layers(info: Mapping[str, Any]) -> tuple[Method, ...]:
    """What each layer stores.

    Args:
        info: ``/server_info`` of a server with the tier.

    Raises:
        UnknownLayersError: the model's sizes cannot be read here, or do not tell.
    """
    shape = _shape(info)
    state = info["internal_states"][0]["hcache"]
    if _kind(info) is PlanKind.RECOMPUTE:
        return (Method.RECOMPUTE,) * shape.num_layers
    row_bytes = state["host"]["chunk_bytes"] // CHUNK_TOKENS
    hidden, kv = shape.hidden_row_bytes, shape.kv_row_bytes
    if hidden == kv:
        raise UnknownLayersError(
            "hidden states are as large as K and V here, so sizes do not tell which is stored"
        )
    num_kv, rest = divmod(row_bytes - shape.num_layers * hidden, kv - hidden)
    if rest or not 0 <= num_kv <= shape.num_layers:
        raise UnknownLayersError(f"chunks of {row_bytes} bytes a token do not fit the model's sizes")
    return Split(0, shape.num_layers - num_kv, num_kv).methods()


def _kind(info: Mapping[str, Any]) -> PlanKind | None:
    try:
        return PlanKind(json.loads(info["hicache_storage_backend_extra_config"])["method"])
    except (ValueError, TypeError, KeyError):
        return None


def _shape(info: Mapping[str, Any]) -> ModelShape:
    path = Path(str(info.get("model_path", ""))) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UnknownLayersError(f"this machine cannot read the model's sizes ({path})") from None
    dtype = str(info.get("dtype") or "auto")
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
        # As SGLang serves it. (Gemma: in bfloat16, of the same size.)
        dtype = "float16" if dtype == "float32" else dtype
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    try:
        return ModelShape.from_config(config, path.parent.name or "model", dtype)
    except ValueError as error:
        raise UnknownLayersError(f"sizes of this model are not known here: {error}") from None
