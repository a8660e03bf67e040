"""Tiers that hold a prompt's state."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore


def salted(keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Other keys in place of ``keys``: two variants must not share chunks on disk."""
    salt = os.urandom(16)
    return [ChunkKey(bytes(a ^ b for a, b in zip(key, salt * 2, strict=True))) for key in keys]


def filled_tiers(
    layout: StateLayout, keys: Sequence[ChunkKey], rows: Sequence[torch.Tensor], disk: DiskStore | None
) -> TieredStore:
    """Tiers that hold the chunks ``keys``, one prefix, on ``disk`` or, without one, in host memory.

    Args:
        rows: of each layer, (tokens, width), at least 64 for each key.
    """
    count = len(keys)
    chunks = [
        layer[: count * CHUNK_TOKENS].contiguous().cpu().view(torch.uint8).reshape(count, -1).numpy()
        for layer in rows
    ]
    slots = 0 if disk is not None else count  # without slots nothing is promoted
    host = HostTier(host_buffer(slots * layout.chunk_bytes), layout, Counters(), keep_dirty=False)
    tiers = TieredStore(host, disk, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=RUN_CHUNKS)
    for first in range(0, count, RUN_CHUNKS):
        part = slice(first, min(first + RUN_CHUNKS, count))
        if disk is not None:
            run = Run(bytes(16), tuple(keys[part]), first, layout.chunk_layer_bytes)
            disk.write_run(run, lambda layer, part=part: list(chunks[layer][part]))
            continue
        for index in range(part.start, part.stop):
            slot = tiers.reserve()
            assert slot is not None
            for layer, rows_of_layer in enumerate(chunks):
                host.layer_of(slot, layer)[:] = rows_of_layer[index]
            tiers.seal(slot, ChunkInfo(keys[index], bytes(32), index, bytes(16)))
    return tiers
