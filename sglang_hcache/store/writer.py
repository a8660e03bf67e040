"""Writing a run: headers with digests, straight from the caller's memory where alignment allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sglang_hcache.store.format.geometry import BLOCK, extent_bytes
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.record import ExtentHeader, digest, pack_header
from sglang_hcache.store.io.engine import IOKind, IOOp
from sglang_hcache.store.io.memory import ByteArray, ScratchPool, check_bytes, is_aligned
from sglang_hcache.store.segments import StoredRun
from sglang_hcache.store.volumes.transfers import Transfers, check_complete

BATCH_BYTES = 32 * 2**20
"""Payload of layers that travel together: bounds the memory a write needs, one layer at least."""

Payload = Callable[[int], Sequence[ByteArray]]


class RunWriter:
    """Stateless but for one scratch buffer a thread."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._scratch = ScratchPool()

    def write(self, run: StoredRun, payload: Payload) -> None:
        """Write all extents of a run and make them durable; its segment is pinned.

        Raises:
            StoreFullError, StoreIOError: the run must not be put into the catalog. After a StoreTimeoutError some of
                it may still be written.
            ValueError: ``payload`` returned something of a wrong shape.
        """
        place, part_bytes = run.place, run.place.shape.part_bytes
        firsts: dict[int, bytes] = {}
        for layers in _batches(place):
            firsts |= self._write_layers(run, layers, payload)
        files = {stripe: run.segment.file(stripe, writing=True) for stripe in firsts}
        self._run([IOOp(IOKind.SYNC, stripe, file) for stripe, file in files.items()], max(part_bytes))
        # Last the headers by which a start finds the run, so that it finds none of which anything is missing.
        memory = self._scratch.take(BLOCK * len(firsts))
        ops = []
        for (stripe, header), at in zip(firsts.items(), range(0, memory.size, BLOCK), strict=True):
            memory[at : at + BLOCK] = np.frombuffer(header, np.uint8)
            ops.append(
                IOOp(IOKind.WRITE, stripe, files[stripe], place.offsets[stripe], (memory[at : at + BLOCK],))
            )
        self._run(ops)

    def _write_layers(self, run: StoredRun, layers: Sequence[int], payload: Payload) -> dict[int, bytes]:
        """Write these layers, but for headers that begin a part: returns them, by directory."""
        firsts: dict[int, bytes] = {}
        place, shape = run.place, run.place.shape
        scratch = self._scratch.take(
            sum(extent_bytes(shape.num_chunks, shape.chunk_layer_bytes[layer]) for layer in layers)
        )
        ops = []
        for layer in layers:
            chunk_bytes = shape.chunk_layer_bytes[layer]
            chunks = payload(layer)
            if len(chunks) != shape.num_chunks:
                raise ValueError(f"payload({layer}) has {len(chunks)} chunks, the run {shape.num_chunks}")
            for chunk in chunks:
                check_bytes(chunk, chunk_bytes, f"a chunk of payload({layer})")
            size = extent_bytes(shape.num_chunks, chunk_bytes)
            extent, scratch = scratch[:size], scratch[size:]
            digests = tuple(digest(chunk.data) for chunk in chunks)
            found, stripe = ExtentHeader(place, layer, digests), shape.stripe(layer)
            header = pack_header(found)
            if found.begins_part:
                firsts[stripe], header = header, bytes(BLOCK)
            extent[:BLOCK] = np.frombuffer(header, np.uint8)
            file = run.segment.file(stripe, writing=True)
            buffers = _buffers(extent, chunks, chunk_bytes, file.direct)
            ops.append(IOOp(IOKind.WRITE, stripe, file, place.extent_offset(layer), buffers))
        self._run(ops)
        return firsts

    def _run(self, ops: Sequence[IOOp], unsynced_bytes: int = 0) -> None:
        results = self._transfers.run(ops, unsynced_bytes)
        if any(result.in_flight for result in results):
            self._scratch.discard()
        check_complete(ops, results)


def _buffers(
    extent: ByteArray, chunks: Sequence[ByteArray], chunk_bytes: int, direct: bool
) -> tuple[ByteArray, ...]:
    """Header, payload and padding to gather; ``extent`` already holds the header and may be filled up."""
    end = BLOCK + len(chunks) * chunk_bytes
    grid = chunk_bytes % BLOCK == 0 and all(is_aligned(chunk) for chunk in chunks)
    if grid or not direct:
        extent[end:] = 0
        padding = (extent[end:],) if end < extent.size else ()
        return (extent[:BLOCK], *chunks, *padding)
    for index, chunk in enumerate(chunks):
        extent[BLOCK + index * chunk_bytes : BLOCK + (index + 1) * chunk_bytes] = chunk
    extent[end:] = 0
    return (extent,)


def _batches(place: RunPlace) -> Iterator[list[int]]:
    """Layers in order, cut into groups of at most ``BATCH_BYTES`` of payload."""
    batch: list[int] = []
    total = 0
    for layer, chunk_bytes in enumerate(place.shape.chunk_layer_bytes):
        size = place.shape.num_chunks * chunk_bytes
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(layer)
        total += size
    if batch:
        yield batch
