"""Step by step: a step is one layer of one block of chunks, and step i + 1 is read while step i is restored.

What lies in host memory in one piece, or nearly, need not be read: it is restored from where it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class _Read:
    """A step that is being read into ``buffer``, or one that need not be read."""

    step: _Step
    buffer: npt.NDArray[np.uint8] | None = None
    future: Future[None] | None = None

    def is_over(self) -> bool:
        """Whether nothing writes to the buffer any more. An error that nobody foresaw says nothing about the device."""
        if self.future is None or self.future.cancel():
            return True
        if not self.future.done():
            return False
        error = self.future.exception()
        return error is None or (isinstance(error, HCacheError) and not isinstance(error, StoreTimeoutError))


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
        steps, reads = deque(self._steps(job)), deque[_Read]()
        try:
            while True:
                while steps and (steps[0].block.is_in_place or self._spare):
                    reads.append(self._begin(steps.popleft()))
                if not reads:
                    return
                self._finish(job, reads[0])
                self._give_back(reads.popleft())
        finally:
            # A read in flight owns its buffer until it ends: leave it to it. The next job takes a new one.
            for read in reads:
                if read.is_over():
                    self._give_back(read)

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

    def _size(self, step: _Step) -> int:
        return len(step.block.keys) * self._tiers.layout.chunk_layer_bytes[step.layer]

    def _begin(self, step: _Step) -> _Read:
        if step.block.is_in_place:
            return _Read(step)
        buffer = self._spare.pop()
        into = buffer[: self._size(step)]
        return _Read(step, buffer, self._readers.submit(self._tiers.read_layer, step.block, step.layer, into))

    def _give_back(self, read: _Read) -> None:
        if read.buffer is not None:
            self._spare.append(read.buffer)

    def _finish(self, job: RestoreJob, read: _Read) -> None:
        self._await(job, read)
        began = time.monotonic()
        step = read.step
        if read.buffer is None:
            pieces = self._tiers.rows_in_place(step.block, step.layer)
        else:
            pieces = [read.buffer[: self._size(step)]]
        self._restore(job, step, pieces)
        job.written_s += time.monotonic() - began

    def _await(self, job: RestoreJob, read: _Read) -> None:
        left_s, began = job.remaining_s(), time.monotonic()
        if read.future is None:
            return
        try:
            read.future.result(timeout=left_s)
        except FutureTimeout:
            raise RestoreTimeoutError(f"a read took longer than {job.deadline_s} s") from None
        finally:
            job.waited_s += time.monotonic() - began

    def _restore(self, job: RestoreJob, step: _Step, pieces: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Bring back the rows of ``step``, which are in ``pieces``, in order."""
        layout, first = self._tiers.layout, step.first_token
        for piece in pieces:
            rows = torch.from_numpy(piece.reshape(-1, layout.row_bytes[step.layer])).view(
                self._restorer.dtype
            )
            end = first + len(rows)
            positions = torch.arange(job.first_position + first, job.first_position + end)
            method = layout.methods[step.layer]
            self._restorer.restore(step.layer, method, rows, positions, job.slots[first:end])
            first = end
