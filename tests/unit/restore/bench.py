"""Restores from a real host tier into a pretend KV pool, with a projector that can be checked by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.streams import Mark, Streams
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.lanes import Lanes
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import LayerPipeline
from sglang_hcache.restore.stage import DeviceStage, StageSizes
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import ChunkLease, TieredStore

LAYERS, WIDTH, SLOTS = 8, 8, 1024
PATIENCE_S = 60.0
"""Longer than anything takes here, however busy the machine is."""
BLOCK_CHUNKS = 2
STAGED_ROWS, STAGED_KV_ROWS = 50, 5 * CHUNK_TOKENS
"""Of a buffer on a device: hidden states of chunks are cut, K and V of two layers of a block are copied together."""
LAYOUT = StateLayout((Method.HIDDEN,) * LAYERS, (4 * WIDTH,) * LAYERS)
KV_LAYOUT = StateLayout((Method.KV,) * LAYERS, (8 * WIDTH,) * LAYERS)


class ReadHook(TieredStore):
    """A tiered store whose reads can be disturbed."""

    before_read: Callable[[int], None] = staticmethod(lambda _layer: None)
    reads = False
    """Whether chunks are read as if one of them were on disk."""
    before_reads: Callable[[list[int]], None] = staticmethod(lambda _layers: None)

    def lease(self, keys, *, promote=False) -> ChunkLease:  # type: ignore[no-untyped-def]
        held = super().lease(keys, promote=promote)
        return replace(held, _pieces=()) if self.reads else held

    def read_layers(self, lease, into) -> None:  # type: ignore[no-untyped-def]
        self.before_reads(list(into))
        for layer in into:
            self.before_read(layer)
        super().read_layers(lease, into)


class DoubleAndPosition:
    """K is twice the hidden state, V is the position."""

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden[:, None, :] * 2, positions[:, None, None].expand(-1, 1, WIDTH).float()


class Pool:
    def __init__(self) -> None:
        self.k = torch.zeros(LAYERS, SLOTS, 1, WIDTH)
        self.v = torch.zeros(LAYERS, SLOTS, 1, WIDTH)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.k[layer][slots] = key
        self.v[layer][slots] = value


class EachLayer:
    """A :class:`~sglang_hcache.device.row_writers.LayerWriter`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, rows: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        for layer, of_layer in enumerate(rows.view(-1, len(slots), 2, 1, WIDTH), start=first):
            self._pool.write(layer, slots, *of_layer.unbind(1))


class Bench:
    """Chunks in host memory that are read as if they were on disk; or used from where they are: in neighbouring slots
    (``in_place``), or in every other one (``scattered``).
    """

    def __init__(
        self,
        chunks: int = 3,
        *,
        in_place: bool = False,
        lanes: int | None = None,
        streams: Streams | None = None,
        buffer_chunks: int = BLOCK_CHUNKS,
        scattered: bool = False,
        layout: StateLayout = LAYOUT,
    ) -> None:
        self.counters = Counters()
        self.streams: Any = streams
        self.layout = layout
        memory = np.zeros(8 * layout.chunk_bytes, np.uint8)
        host = HostTier(memory, layout, self.counters, keep_dirty=False)
        self.tiers = ReadHook(
            host,
            None,
            self.counters,
            write_policy=WritePolicy.WRITE_BACK,
            run_chunks=4,
        )
        self.tiers.reads = not (in_place or scattered)
        self.stored = torch.randn(LAYERS, chunks * CHUNK_TOKENS, layout.row_bytes[0] // 4)
        self.keys = [index.to_bytes(32, "little") for index in range(1, chunks + 1)]
        taken = [slot for _ in range(host.num_slots) if (slot := host.reserve()) is not None]
        used = taken[:chunks] if in_place else taken[: 2 * chunks : 2]
        for slot in set(taken) - set(used):
            host.release(slot)
        for index, (slot, key) in enumerate(zip(used, self.keys, strict=True)):
            rows = slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)
            for layer in range(LAYERS):
                host.layer_of(slot, layer)[:] = self.stored[layer, rows].reshape(-1).view(torch.uint8).numpy()
            self.tiers.seal(slot, ChunkInfo(key, bytes(32), index, bytes(16)))
        self.pool = Pool()
        self.when_certain: Callable[[RestoreJob], None] = lambda _job: None
        self.over = threading.Event()
        num_rows = STAGED_ROWS if layout is LAYOUT else STAGED_KV_ROWS
        sizes = StageSizes(num_rows * layout.row_bytes[0], num_rows * 8 * WIDTH)
        self.restorer = LayerRestorer(
            torch.float32,
            self.pool,
            1,
            DoubleAndPosition(),
            None,
            lanes and Lanes(lanes),
            streams and DeviceStage(streams, sizes, SLOTS),
            streams and EachLayer(self.pool),
        )
        self.pipeline = LayerPipeline(self.tiers, self.restorer, buffer_chunks)
        self.engine = RestoreEngine(self.pipeline, self.counters, self._is_told)

    def run(
        self,
        *,
        first: int = 1,
        deadline_s: float = PATIENCE_S,
        cancel: bool = False,
        layers: tuple[int, ...] = tuple(range(LAYERS)),
        slots: torch.Tensor | None = None,
        fence: Mark | None = None,
        submitted_s_ago: float = 0.0,
    ) -> RestoreJob:
        """Restore the chunks from ``first`` on and wait for the outcome."""
        keys = self.keys[first:]
        starts = range(0, len(keys), BLOCK_CHUNKS)
        blocks = tuple(self.tiers.lease(keys[start : start + BLOCK_CHUNKS]) for start in starts)
        if slots is None:
            slots = torch.randperm(SLOTS)[: CHUNK_TOKENS * len(keys)]
        job = RestoreJob(blocks, first * CHUNK_TOKENS, slots, deadline_s, layers, fence)
        job.submitted -= submitted_s_ago
        if cancel:
            job.cancel()
        self.engine.submit(job)
        assert self.over.wait(2 * PATIENCE_S)
        self.over.clear()
        return job

    def written(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all layers, from a token on, as they should be: (LAYERS, n, WIDTH)."""
        rows = self.stored[:, first:]
        if self.layout is KV_LAYOUT:
            return rows[..., :WIDTH], rows[..., WIDTH:]
        positions = torch.arange(first, self.stored.shape[1]).float()
        return rows * 2, positions[None, :, None].expand(LAYERS, -1, WIDTH)

    def _is_told(self) -> None:
        job = self.engine._job
        assert job is not None
        if job.state is RestoreState.CERTAIN:
            self.when_certain(job)
        else:
            self.over.set()

    def assert_nothing_is_pinned(self) -> None:
        taken = [self.tiers.host.reserve() for _ in range(8)]
        assert None not in taken
