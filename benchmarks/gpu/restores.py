"""Restores from pinned host memory with the server's own engine, on layers with random weights; no SGLang in it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu.kernel import timed
from gpu.layers import MOST_ULPS, Pools, RandomLayers, error_ulps
from gpu.results import Report
from gpu.shapes import SHAPES, Shape, shape_named
from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import HostMemory, PinnedMemory
from sglang_hcache.device.row_writers import RowWriter, load_layer_writer
from sglang_hcache.device.streams import CudaStreams, Streams
from sglang_hcache.device.triton_rows import TritonRows
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import LayerPipeline
from sglang_hcache.restore.stage import DeviceStage, StageSizes
from sglang_hcache.sglang_plugin.seam.budget import MOST_BLOCK_CHUNKS
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

TOKENS, LAYERS, ROUNDS = 4096, 8, 7
_WHOLE = ("llama-2-13b", "llama-3-8b")
"""Of all layers: what a restore takes to begin and to end counts less than among eight."""
_PIECES = (None, 1)
"""Chunks side by side: all, and the worst, which is what a full host tier comes to."""
_LONG, _LONG_TOKENS = "llama-2-13b", 16384


class LayerPool:
    """K and V of some layers."""

    def __init__(
        self, shape: Shape, layers: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers: list[Pools] = [
            tuple(
                torch.zeros(slots, shape.kv_heads, shape.head_dim, dtype=dtype, device=device) for _ in "kv"
            )  # type: ignore[misc]
            for _ in range(layers)
        ]

    def buffers(self, layer: int) -> Pools:
        return self._layers[layer]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for buffer, rows in zip(self._layers[layer], (key, value), strict=True):
            buffer[slots] = rows

    def read(self, layer: int, slots: torch.Tensor) -> Pools:
        key, value = self._layers[layer]
        return key[slots], value[slots]

    def clear(self) -> None:
        for buffers in self._layers:
            for buffer in buffers:
                buffer.fill_(torch.nan)


class Restores:
    """Chunks of one prefix in the host tier, and an engine that brings them back.

    Args:
        rows: of each layer, (tokens, width), on any device.
        piece: so many chunks are neighbours, and a copy; an empty slot is left behind them. None: all.
    """

    def __init__(
        self,
        method: Method,
        rows: Sequence[torch.Tensor],
        restorer: LayerRestorer,
        memory: HostMemory,
        *,
        piece: int | None = None,
    ) -> None:
        self._restorer = restorer
        row_bytes = rows[0].shape[1] * rows[0].element_size()
        layout = StateLayout((method,) * len(rows), (row_bytes,) * len(rows))
        count = len(rows[0]) // CHUNK_TOKENS
        slots = [index + index // (piece or count) for index in range(count)]
        host = HostTier(memory((slots[-1] + 1) * layout.chunk_bytes), layout, Counters(), keep_dirty=False)
        self._tiers = TieredStore(host, None, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=16)
        self.keys = [ChunkKey(index.to_bytes(32, "little")) for index in range(1, count + 1)]
        taken = [host.reserve() for _ in range(host.num_slots)]
        for index, key in enumerate(self.keys):
            slot, tokens = taken[slots[index]], slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)
            assert slot is not None
            for layer, of_layer in enumerate(rows):
                host.layer_of(slot, layer)[:] = of_layer[tokens].cpu().view(torch.uint8).reshape(-1).numpy()
            self._tiers.seal(slot, ChunkInfo(key, bytes(32), index, bytes(16)))
        self._over = threading.Event()
        pipeline = LayerPipeline(self._tiers, restorer, MOST_BLOCK_CHUNKS, memory)
        self._engine = RestoreEngine(pipeline, Counters(), self._over.set)

    def run(self, slots: torch.Tensor) -> float:
        """Seconds of bringing all chunks into ``slots``."""
        began = time.monotonic()
        leases = tuple(
            self._tiers.lease(self.keys[first : first + MOST_BLOCK_CHUNKS])
            for first in range(0, len(self.keys), MOST_BLOCK_CHUNKS)
        )
        layers = tuple(range(self._tiers.layout.num_layers))
        job = RestoreJob(leases, 0, slots, 60.0, layers, self._restorer.fence())
        self._over.clear()
        self._engine.submit(job)
        while not job.is_over:  # told when it is certain, too
            self._over.wait()
            self._over.clear()
        if job.state is not RestoreState.DONE:
            raise RuntimeError(f"a restore ended as {job.state.value}: {job.error!r}")
        return time.monotonic() - began

    def close(self) -> None:
        self._engine.close()


class RestoreCheck:
    """One shape's layers, stored by one method."""

    def __init__(
        self,
        shape: Shape,
        method: Method,
        streams: Streams,
        writer: RowWriter,
        memory: HostMemory,
        *,
        tokens: int,
        layers: int,
        dtype: torch.dtype,
        piece: int | None = None,
    ) -> None:
        device = streams.device
        self.layers = RandomLayers.of(shape, layers, tokens, dtype, device)
        self.positions = torch.arange(tokens, device=device)
        draw = torch.Generator(device).manual_seed(2)
        hidden = [
            torch.randn(tokens, shape.hidden_size, generator=draw, device=device).to(dtype)
            for _ in range(layers)
        ]
        self.true = [self.layers.project(layer, rows, self.positions) for layer, rows in enumerate(hidden)]
        self.rows = hidden
        if method is Method.KV:
            self.rows = [torch.cat([part.flatten(1) for part in pair], dim=1) for pair in self.true]
        self.pool = LayerPool(shape, layers, 2 * tokens, dtype, device)
        self.slots = torch.randperm(2 * tokens, generator=draw, device=device)[:tokens]
        # As a server's, which may have both.
        sizes = StageSizes.of(dtype.itemsize * shape.hidden_size, dtype.itemsize * 2 * shape.width)
        self.stage = DeviceStage(streams, sizes, tokens)
        self._method, self._writer = method, writer
        self._layer_writer = load_layer_writer(self.pool, layers)
        restorer = LayerRestorer(
            *(dtype, self.pool, shape.kv_heads, self.layers, writer),
            stage=self.stage,
            layers=self._layer_writer,
        )
        self.restores = Restores(method, self.rows, restorer, memory, piece=piece)

    def error(self) -> float:
        """Of one restore into a poisoned pool, units in the last place.

        V that is projected may differ as K may: other shapes of a product round in another order.
        """
        self.pool.clear()
        self.restores.run(self.slots)
        return self.error_in_pool()

    def error_in_pool(self) -> float:
        """As it is now."""
        return max(
            error_ulps(mine, true)
            for layer, pair in enumerate(self.true)
            for mine, true in zip(self.pool.read(layer, self.slots), pair, strict=True)
        )

    def compute(self) -> None:
        """What a restore asks the device for besides the copies, a layer at a time, on the current stream."""
        for layer, rows in enumerate(self.rows):
            if self._method is Method.KV:
                self._layer_writer(rows, layer, self.slots)
                continue
            key, value = self.layers.project_unrotated(layer, rows)
            self._writer.finish(
                key, value, self.layers.steps, self.positions, self.slots, self.pool.buffers(layer)
            )

    def close(self) -> None:
        self.restores.close()


@dataclass(frozen=True, slots=True)
class _Case:
    shape: Shape
    layers: int
    tokens: int
    method: Method
    piece: int | None

    @property
    def name(self) -> str:
        whole = "whole, " if self.layers == self.shape.num_layers else ""
        place = "in one piece" if self.piece is None else f"in pieces of {self.piece}"
        return f"{self.shape.name}, {whole}{self.tokens} tokens, {self.method.value}, {place}"


def _cases() -> list[_Case]:
    """Two whole models, then some layers of each."""
    both = (Method.HIDDEN, Method.KV)
    found = [
        _Case(shape, shape.num_layers, TOKENS, method, piece)
        for shape in map(shape_named, _WHOLE)
        for piece in _PIECES
        for method in both
    ]
    found.append(_Case(shape_named(_LONG), shape_named(_LONG).num_layers, _LONG_TOKENS, Method.HIDDEN, None))
    return found + [
        _Case(shape, LAYERS, TOKENS, method, piece)
        for shape in SHAPES
        for piece in _PIECES
        for method in both
    ]


def measure(report: Report) -> None:
    """Hidden states and K and V of every shape, neighbouring chunks and scattered ones; times and floors."""
    device, memory = torch.device("cuda", 0), PinnedMemory()  # which must live as long as the process
    with torch.inference_mode():
        for case in _cases():
            report(case.name, _measure_one(case, device, memory))
            torch.cuda.empty_cache()


def _measure_one(case: _Case, device: torch.device, memory: HostMemory) -> dict[str, Any]:
    check = RestoreCheck(
        case.shape,
        case.method,
        CudaStreams(device),
        TritonRows(),
        memory,
        tokens=case.tokens,
        layers=case.layers,
        dtype=torch.bfloat16,
        piece=case.piece,
    )
    ulps = max(check.error() for _ in range(2))
    seconds = statistics.median(check.restores.run(check.slots) for _ in range(ROUNDS))
    copy_s, compute_s = _floors(check)
    check.close()
    return {
        "ulps": ulps,
        "ok": ulps <= MOST_ULPS,
        "milliseconds": 1e3 * seconds,
        "tokens_per_s": case.tokens / seconds,
        "layers": case.layers,
        "copy_milliseconds": 1e3 * copy_s,
        "compute_milliseconds": 1e3 * compute_s,
        "efficiency": max(copy_s, compute_s) / seconds,
    }


def _floors(check: RestoreCheck) -> tuple[float, float]:
    """Seconds of the copies alone, a layer at a time, and of the products and kernels alone."""
    pinned = check.rows[0].cpu().pin_memory()  # every layer has as many bytes
    target = torch.empty_like(check.rows[0])
    copy_s = timed(lambda: [target.copy_(pinned, non_blocking=True) for _ in check.rows], rounds=ROUNDS)
    return copy_s, timed(check.compute, rounds=ROUNDS)
