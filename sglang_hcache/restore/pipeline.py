"""Step by step: a step is a layer of a block of chunks, or several small ones; step i + 1 is read under step i.

What lies in host memory need not be read: it is restored from where it is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.errors import HCacheError, StoreTimeoutError
from sglang_hcache.core.layout import CHUNK_TOKENS, StateLayout
from sglang_hcache.device.memory import HostMemory, host_buffer
from sglang_hcache.restore.job import RestoreJob
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.rows import StoredRows, Writing
from sglang_hcache.tier.tiered import ChunkLease, TieredStore

NUM_BUFFERS = 4
"""Steps in memory at once: some are restored, the others are read."""
NUM_READERS = NUM_BUFFERS - 1
"""Steps that are read at once. With as many as there are buffers, all arrive at about the same time: the first one
late, and while it is restored there is no buffer to read into."""
_MOST_WRITES = 2
"""Steps that are restored at once: who is done with its part of one begins with the next one."""
_FEWEST_STEPS = 6
"""About, of a block: reading goes on under restoring. Whole layers, rounded up, may make one or two fewer."""
_MOST_ASKED = _FEWEST_STEPS
"""The same as ``_MOST_WRITES`` of a GPU, and what it copies from where it is: a block ..."""
_MOST_ASKED_BYTES = 2 * 2**30
"""... and more steps up to so much, which the bus takes 40 ms for: the pass behind a restore is prepared and launched
once all of it is asked for. More would delay the end of a restore that is stopped."""
STEP_BYTES = 4 * 2**20
"""Layers are read together up to so much: to begin and to end a step takes as long as about a quarter of it."""


def buffer_bytes(layout: StateLayout, block_chunks: int) -> int:
    """Bytes of one buffer: the largest layer of ``block_chunks`` chunks."""
    return block_chunks * max(layout.chunk_layer_bytes)


def most_together(num_layers: int) -> int:
    """Layers of a step, at most, of a block whose ``num_layers`` come back."""
    return -(-num_layers // _FEWEST_STEPS)


def layers_of_steps(
    layer_bytes: Mapping[int, int],
    most_bytes: float,
    most_layers: int | None = None,
    *,
    begins: bool = False,
) -> list[tuple[int, ...]]:
    """The layers of each step of a block.

    Args:
        layer_bytes: layer -> its bytes in the whole block, in the order in which they come back.
        most_bytes: of a step of several layers; infinite if nothing is read.
        most_layers: of a step; None: as for a block of which these layers come back.
        begins: whether reads begin with this block. Nothing can be restored under the first one, so it is short.
    """
    most_layers = most_layers or most_together(len(layer_bytes))
    steps: list[tuple[int, ...]] = []
    step_bytes = 0
    for layer, size in layer_bytes.items():
        if steps and len(steps[-1]) < most_layers and step_bytes + size <= most_bytes:
            steps[-1] += (layer,)
            step_bytes += size
        else:
            steps.append((layer,))
            step_bytes = size
    if begins and steps and len(steps[0]) > 1:
        steps[:1] = [steps[0][:1], steps[0][1:]]
    return steps


def parts_of(
    buffer: npt.NDArray[np.uint8], layer_bytes: Mapping[int, int]
) -> dict[int, npt.NDArray[np.uint8]]:
    """Where in ``buffer`` each layer of a step is read to."""
    ends = itertools.accumulate(layer_bytes.values())
    return {
        layer: buffer[end - size : end] for (layer, size), end in zip(layer_bytes.items(), ends, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Step:
    """Layers of a block that are read and restored together."""

    block: ChunkLease
    first_token: int
    layers: tuple[int, ...]
    num_bytes: int
    """Of all rows."""


@dataclass(frozen=True, slots=True)
class Read:
    """A step that is being read into ``buffer``, or one that need not be read."""

    step: Step
    buffer: npt.NDArray[np.uint8] | None = None
    into: Mapping[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Layer -> its part of the buffer."""
    future: Future[None] | None = None

    def has_ended(self) -> bool:
        """False while it goes on. One that did not begin does not."""
        return self.future is None or self.future.cancel() or self.future.done()

    def frees_buffer(self) -> bool:
        """Whether nothing writes to the buffer of a read that ended any more.

        An error that nobody foresaw says nothing about the device.
        """
        if self.future is None or self.future.cancelled():
            return True
        error = self.future.exception()
        return error is None or (isinstance(error, HCacheError) and not isinstance(error, StoreTimeoutError))


@dataclass(frozen=True, slots=True)
class _Write:
    """A step that was read and is being restored."""

    read: Read
    parts: list[Writing] = field(default_factory=list)

    def is_over(self) -> bool:
        return all(part.done() for part in self.parts)

    def stop(self) -> None:
        """Begin with no more parts, and wait for those that go on."""
        for part in [part for part in self.parts if not part.cancel()]:
            with contextlib.suppress(Exception):  # why the job ends is known already
                part.result()


class LayerPipeline:
    """Restores jobs, one at a time, with a few threads that read.

    Args:
        block_chunks: most chunks of a job's block.
        memory: makes the buffers that are read into.
        num_buffers: of them.
    """

    def __init__(
        self,
        tiers: TieredStore,
        restorer: LayerRestorer,
        block_chunks: int,
        memory: HostMemory = host_buffer,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.layout = tiers.layout
        self._tiers = tiers
        self._restorer = restorer
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="hcache-read")
        self._buffer_bytes = buffer_bytes(tiers.layout, block_chunks)
        self.most_read = min(STEP_BYTES, self._buffer_bytes)
        """Bytes of a step of several layers."""
        self._memory = memory
        self._num_buffers = num_buffers
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._left: list[Read] = []
        """Reads that went on when their job was over."""
        self._replace_buffers()

    def run(self, job: RestoreJob, when_certain: Callable[[], None] = lambda: None) -> None:
        """Write K and V of every layer to ``job.slots``; returns only when all layers were verified.

        Args:
            when_certain: called when the job is CERTAIN.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job was stopped.
            StoreError: a read failed or its bytes are wrong.
        """
        self._replace_buffers()
        steps, reads, writes = deque(self.steps(job)), deque[Read](), deque[_Write]()
        try:
            while steps or reads or writes:
                while steps and (steps[0].block.is_in_place or self._spare):
                    reads.append(self._begin(steps.popleft()))
                if writes and (not reads or not self._may_start(reads[0], writes) or writes[0].is_over()):
                    self._finish(job, writes[0])
                    self._give_back(writes.popleft().read)
                else:
                    self._await(job, reads[0])
                    job.await_fence()
                    writes.append(_Write(reads.popleft()))
                    self._start(job, writes[-1])
                    written = None if steps or reads else self._restorer.written()
                    if written is not None:
                        job.ask(written)
                        when_certain()
        finally:
            for write in writes:  # whoever sees the job's end may use its slots
                write.stop()
                self._give_back(write.read)
            self._left += reads
            self._take_back()

    def close(self) -> None:
        """Begin with no more reads. One that hangs is not waited for."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _take_back(self) -> None:
        """The buffers of reads that have ended. One in flight owns its buffer, and one that was given up keeps it.

        Another one may have been made in its place: there are never more to read into than there should be.
        """
        left, self._left = self._left, []
        for read in left:
            if not read.has_ended():
                self._left.append(read)
            elif read.frees_buffer() and len(self._spare) < self._num_buffers:
                self._give_back(read)

    def _replace_buffers(self) -> None:
        """Before a job: pinning memory takes long, so what can be used again is."""
        self._take_back()
        # Here, where it fails a job: without buffers nothing would be read, and no read would fail.
        while len(self._spare) < self._num_buffers:
            self._spare.append(self._memory(self._buffer_bytes))

    # -- what a comparison does otherwise --------------------------------------------------------

    def steps(self, job: RestoreJob) -> Iterator[Step]:
        """What is read and restored together, in order."""
        first_token = 0
        for block in job.blocks:
            begins = first_token == 0 and not block.is_in_place
            layer_bytes = self.layer_bytes(block, job.layers)
            for layers in layers_of_steps(layer_bytes, self.most_bytes(block), begins=begins):
                yield Step(block, first_token, layers, sum(layer_bytes[layer] for layer in layers))
            first_token += CHUNK_TOKENS * len(block.keys)

    def layer_bytes(self, block: ChunkLease, layers: Iterable[int]) -> dict[int, int]:
        """Layer -> bytes of all chunks of ``block``, for each of ``layers``."""
        sizes = self.layout.chunk_layer_bytes
        return {layer: len(block.keys) * sizes[layer] for layer in layers}

    def most_bytes(self, block: ChunkLease) -> float:
        """Most bytes of a step of several layers of ``block``."""
        return math.inf if block.is_in_place else self.most_read

    def rows(self, read: Read, layer: int) -> StoredRows:
        """One layer of a step, once it was read."""
        method = self.layout.methods[layer]
        memory, chunks = (
            (read.into[layer], ((0, len(read.step.block.keys)),))
            if read.into
            else self._tiers.rows_in_place(read.step.block, layer)
        )
        rows = torch.from_numpy(memory.reshape(-1, self.layout.row_bytes[layer])).view(self._restorer.dtype)
        spans = tuple((CHUNK_TOKENS * first, CHUNK_TOKENS * count) for first, count in chunks)
        return StoredRows(layer, method, rows, spans)

    # -- a step after the other ------------------------------------------------------------------

    def _may_start(self, read: Read, writes: Collection[_Write]) -> bool:
        """Whether ``read`` may be restored beside ``writes``."""
        if self._restorer.stage is None or read.buffer is not None:
            return len(writes) < _MOST_WRITES
        asked = sum(write.read.step.num_bytes for write in writes)
        return len(writes) < _MOST_ASKED or asked + read.step.num_bytes <= _MOST_ASKED_BYTES

    def _begin(self, step: Step) -> Read:
        if step.block.is_in_place:
            return Read(step)
        buffer = self._spare.pop()
        into = parts_of(buffer, self.layer_bytes(step.block, step.layers))
        return Read(step, buffer, into, self._readers.submit(self._tiers.read_layers, step.block, into))

    def _give_back(self, read: Read) -> None:
        if read.buffer is not None:
            self._spare.append(read.buffer)

    def _start(self, job: RestoreJob, write: _Write) -> None:
        """Begin to bring back the rows of a step that was read."""
        began, step = time.monotonic(), write.read.step
        stored = [self.rows(write.read, layer) for layer in step.layers]
        first, end = step.first_token, step.first_token + len(stored[0])
        positions = self._restorer.positions(job.first_position + first, job.first_position + end)
        write.parts.extend(self._restorer.start(stored, positions, job.slots[first:end], job.check))
        job.written_s += time.monotonic() - began

    def _finish(self, job: RestoreJob, write: _Write) -> None:
        if not job.is_certain:
            job.check()
        began = time.monotonic()
        for part in write.parts:
            part.result()
        job.written_s += time.monotonic() - began

    def _await(self, job: RestoreJob, read: Read) -> None:
        if read.future is None:
            return
        began = time.monotonic()
        try:
            job.await_read(read.future)
        finally:
            job.waited_s += time.monotonic() - began
