"""K and V of some tokens out of the KV pool, layers of them at a time: to save what a pass has written."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device.kv_rows import GatheredRows, load_library
from sglang_hcache.device.projector import KVPool


class KVGather(Protocol):
    """Reads rows of the pool."""

    def __call__(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        """K and V of ``slots``, (n,) int64, in neighbouring layers from ``first`` on.

        Args:
            into: (layers, n, 2 * kv_heads * head_dim): K, then V.
        """


class TorchGather:
    """By torch's operations, a layer at a time, where nothing else can be had. A :class:`KVGather`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def __call__(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        for layer, rows in enumerate(into, start=first):
            for buffer, part in zip(self._pool.buffers(layer), rows.chunk(2, dim=1), strict=True):
                torch.index_select(buffer.flatten(1), 0, slots, out=part)


def load_gather(pool: KVPool, num_layers: int, *, is_cpu: bool) -> KVGather:
    """The one for this device."""
    pools = [pool.buffers(layer) for layer in range(num_layers)]
    if is_cpu:
        try:
            return GatheredRows(load_library(), pools)
        except (ConfigError, OSError):  # whoever writes rows has said so
            return TorchGather(pool)
    # Imported where it is used: Triton is slow to import, and a CPU has no use for it.
    from sglang_hcache.device.triton_layers import TritonGather

    return TritonGather(pools)
