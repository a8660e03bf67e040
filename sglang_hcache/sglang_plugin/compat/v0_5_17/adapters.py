"""SGLang 0.5.17's LoRA adapters: whose K and V are whose, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sglang_hcache.device.fingerprint import adapter_fingerprint, parts_fingerprint
from sglang_hcache.sglang_plugin.seam.ranks import Ranks

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

_ID_LETTERS = 32
"""Letters of a ``lora_id``: a UUID in hexadecimal."""
_MOST_REMEMBERED = 4096
"""Adapters, of those unloaded as well: their KV may be evicted later than they are."""


class AdaptersOf:
    """Our ``Adapters``.

    SGLang appends the adapter's id to the request's ``extra_key``. That tells adapters of one process apart. But one
    that is loaded again has another id, and one of ``--lora-paths`` has the same after its files have changed.

    Args:
        ranks: each reads an adapter for itself, and may find other files: what they hold together counts.
    """

    def __init__(self, manager: LoRAManager, ranks: Ranks) -> None:
        self._manager = manager
        self._ranks = ranks
        self._fingerprints: dict[str, bytes] = {}
        for lora_id in manager.loras:
            self._read(lora_id)  # before anybody is served: a gigabyte takes two seconds

    def apart(self, tenant: str) -> tuple[str | None, bytes | None]:
        lora_id = tenant[-_ID_LETTERS:]
        fingerprint = self._fingerprints.get(lora_id) or self._read(lora_id)
        if fingerprint is None:
            return tenant, None
        return tenant[:-_ID_LETTERS] or None, fingerprint

    def _read(self, lora_id: str) -> bytes | None:
        adapter = self._manager.loras.get(lora_id)
        if adapter is None:
            return None
        if len(self._fingerprints) == _MOST_REMEMBERED:
            del self._fingerprints[next(iter(self._fingerprints))]
        of_all = self._ranks.all_of(adapter_fingerprint(_tensors(adapter)))
        fingerprint = self._fingerprints[lora_id] = parts_fingerprint(of_all)
        return fingerprint


def load_everywhere(
    original: Callable[..., LoRAUpdateOutput], scheduler: Any, request: Any
) -> LoRAUpdateOutput:
    """AROUND hook of what loads an adapter: it is loaded on all ranks or on none.

    SGLang answers with rank 0's result. The others may have another, and then a request with the adapter would be
    handled differently on each. What is loaded here is unloaded, or loading it once more would fail.
    """
    result = original(scheduler, request)
    answers = scheduler.tree_cache.bridge.ranks.all_of((result.success, result.error_message))
    failures = [f"rank {rank}: {why}" for rank, (success, why) in enumerate(answers) if not success]
    if result.success and failures:
        result = scheduler.tp_worker.unload_lora_adapter(request)
        result.success = False
        result.error_message = f"not all ranks could load it, so none keeps it ({'; '.join(failures)})"
    return result


def _tensors(adapter: LoRAAdapter) -> Iterator[tuple[str, torch.Tensor]]:
    """All that its effect depends on; the rank is in the shapes."""
    yield "scaling", torch.tensor([adapter.scaling], dtype=torch.float64)
    for index, layer in enumerate(adapter.layers):
        yield from ((f"layers.{index}.{name}", weight) for name, weight in layer.weights.items())
    for kind in ("embedding_layers", "added_tokens_embeddings"):
        yield from ((f"{kind}.{name}", weight) for name, weight in getattr(adapter, kind).items())
