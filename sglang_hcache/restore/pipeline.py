"""Step by step: a step is one layer of one block of chunks, and step i + 1 is read while step i is restored."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.errors import HCacheError, RestoreTimeoutError, StoreTimeoutError
from sglang_hcache.core.layout import CHUNK_TOKENS, StateLayout
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.restore.job import RestoreJob
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.tier.tiered import ChunkLease, TieredStore

NUM_BUFFERS = 3
"""Steps in memory at once: one is restored, the others are read."""


def buffer_bytes(layout: StateLayout, block_chunks: int) -> int:
    """Bytes of one buffer: the largest layer of ``block_chunks`` chunks."""
    return block_chunks * max(layout.chunk_layer_bytes)


@dataclass(frozen=True, slots=True)
class _Step:
    block: ChunkLease
    first_token: int
    layer: int


class LayerPipeline:
    """Restores jobs, one at a time.

    Args:
        readers: threads that read; they outlive the pipeline.
        block_chunks: most chunks of a job's block.
    """

    def __init__(
        self,
        tiers: TieredStore,
        restorer: LayerRestorer,
        readers: ThreadPoolExecutor,
        block_chunks: int,
    ) -> None:
        self._tiers = tiers
        self._restorer = restorer
        self._readers = readers
        self._buffer_bytes = buffer_bytes(tiers.layout, block_chunks)
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._replace_buffers()

    def run(self, job: RestoreJob) -> None:
        """Write K and V of every layer to ``job.slots``; returns only when all layers were verified.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job was stopped.
            StoreError: a read failed or its bytes are wrong.
        """
        self._replace_buffers()
        to_read = self._steps(job)
        reads: deque[tuple[_Step, npt.NDArray[np.uint8], Future[None]]] = deque()
        try:
            while True:
                while self._spare and (step := next(to_read, None)) is not None:
                    buffer = self._spare.pop()
                    reads.append((step, buffer, self._submit(step, buffer)))
                if not reads:
                    return
                step, buffer, read = reads[0]
                self._await(job, read)
                self._restore(job, step, buffer)
                self._spare.append(buffer)
                reads.popleft()
        finally:
            # A read in flight owns its buffer until it ends: leave it to it. The next job takes a new one.
            self._spare += [buffer for _, buffer, read in reads if read.cancel() or _is_over(read)]

    def _replace_buffers(self) -> None:
        # Here, where it fails a job: without buffers nothing would be read, and no read would fail.
        while len(self._spare) < NUM_BUFFERS:
            self._spare.append(host_buffer(self._buffer_bytes))

    def _steps(self, job: RestoreJob) -> Iterator[_Step]:
        first_token = 0
        for block in job.blocks:
            for layer in job.layers:
                yield _Step(block, first_token, layer)
            first_token += CHUNK_TOKENS * len(block.keys)

    def _submit(self, step: _Step, buffer: npt.NDArray[np.uint8]) -> Future[None]:
        size = len(step.block.keys) * self._tiers.layout.chunk_layer_bytes[step.layer]
        return self._readers.submit(self._tiers.read_layer, step.block, step.layer, buffer[:size])

    def _await(self, job: RestoreJob, read: Future[None]) -> None:
        began = time.monotonic()
        try:
            read.result(timeout=job.remaining_s())
        except FutureTimeout:
            raise RestoreTimeoutError(f"a read took longer than {job.deadline_s} s") from None
        finally:
            job.waited_s += time.monotonic() - began

    def _restore(self, job: RestoreJob, step: _Step, buffer: npt.NDArray[np.uint8]) -> None:
        began = time.monotonic()
        count = CHUNK_TOKENS * len(step.block.keys)
        row_bytes = self._tiers.layout.row_bytes[step.layer]
        rows = torch.from_numpy(buffer[: count * row_bytes].reshape(count, row_bytes))
        first = job.first_position + step.first_token
        slots = job.slots[step.first_token : step.first_token + count]
        positions = torch.arange(first, first + count)
        method = self._tiers.layout.methods[step.layer]
        self._restorer.restore(step.layer, method, rows.view(self._restorer.dtype), positions, slots)
        job.written_s += time.monotonic() - began


def _is_over(read: Future[None]) -> bool:
    """Whether nothing writes to the buffer any more. An error that nobody foresaw says nothing about the device."""
    if not read.done():
        return False
    error = read.exception()
    return error is None or (isinstance(error, HCacheError) and not isinstance(error, StoreTimeoutError))
