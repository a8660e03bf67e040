"""Layer by layer: layer i + 1 is read while layer i is projected."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.errors import RestoreTimeoutError
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.device.projector import KVSink, Projector, project_layer
from sglang_hcache.restore.job import RestoreJob
from sglang_hcache.tier.tiered import TieredStore

_READS_AHEAD = 2

Buffer: TypeAlias = npt.NDArray[np.uint8]


class LayerPipeline:
    """Restores jobs, one at a time, with the ``hidden`` method.

    Args:
        readers: threads that read layers; they outlive the pipeline.
        dtype: element type of the stored hidden states.
    """

    def __init__(
        self,
        tiers: TieredStore,
        projector: Projector,
        sink: KVSink,
        readers: ThreadPoolExecutor,
        dtype: torch.dtype,
    ) -> None:
        self._tiers = tiers
        self._projector = projector
        self._sink = sink
        self._readers = readers
        self._dtype = dtype
        self._spare: list[Buffer] = []

    def run(self, job: RestoreJob) -> None:
        """Write K and V of every layer to ``job.slots``; returns only when all layers were verified.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job was stopped.
            StoreError: a read failed or its bytes are wrong.
        """
        layout = self._tiers.layout
        size = len(job.lease.keys) * max(layout.chunk_layer_bytes)
        spare = self._take_buffers(size)
        positions = torch.arange(job.first_position, job.first_position + job.num_tokens)
        reads: deque[tuple[Buffer, Future[None]]] = deque()
        next_layer = 0
        try:
            for layer in range(layout.num_layers):
                while spare and next_layer < layout.num_layers:
                    buffer = spare.pop()
                    reads.append((buffer, self._submit(job, next_layer, buffer)))
                    next_layer += 1
                buffer, read = reads.popleft()
                self._await(job, read)
                self._project(job, layer, buffer, positions)
                spare.append(buffer)
            self._spare = spare
        finally:
            # A read in flight owns its buffer and its lease until it ends: let it, then drop the buffer.
            for _, read in reads:
                read.cancel()

    def _take_buffers(self, size: int) -> list[Buffer]:
        spare, self._spare = self._spare, []
        if len(spare) == _READS_AHEAD + 1 and spare[0].size >= size:
            return spare
        return [host_buffer(size) for _ in range(_READS_AHEAD + 1)]

    def _submit(self, job: RestoreJob, layer: int, buffer: Buffer) -> Future[None]:
        count = len(job.lease.keys) * self._tiers.layout.chunk_layer_bytes[layer]
        return self._readers.submit(self._tiers.read_layer, job.lease, layer, buffer[:count])

    def _await(self, job: RestoreJob, read: Future[None]) -> None:
        try:
            read.result(timeout=job.remaining_s())
        except FutureTimeout:
            raise RestoreTimeoutError(f"a read took longer than {job.deadline_s} s") from None

    def _project(self, job: RestoreJob, layer: int, buffer: Buffer, positions: torch.Tensor) -> None:
        row_bytes = self._tiers.layout.row_bytes[layer]
        rows = buffer[: len(job.lease.keys) * CHUNK_TOKENS * row_bytes].reshape(-1, row_bytes)
        hidden = torch.from_numpy(rows).view(self._dtype)
        project_layer(self._projector, self._sink, layer, hidden, positions, job.slots)
