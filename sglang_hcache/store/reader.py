"""Reading some layers of some chunks: plan the transfers, run them as one batch, verify, copy what must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError, StoreError
from sglang_hcache.store.catalog import RunSlice
from sglang_hcache.store.format.geometry import BLOCK, round_up
from sglang_hcache.store.format.record import bad_chunks, check_header, parse_header
from sglang_hcache.store.io.engine import IOKind, IOOp, OpenFile
from sglang_hcache.store.io.memory import ByteArray, ScratchPool, is_aligned
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.transfers import Transfers, check_complete

PIECE_BYTES = 512 * 2**10
"""Largest single transfer: longer ones are split so that a device sees several at once."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the payload of one layer of a slice travels."""

    straight: bool
    """Right into the caller's memory; otherwise through scratch memory."""
    begin: int
    """First payload byte to read, counted from the payload's start."""
    end: int
    skip: int
    """Bytes read before the first one wanted."""

    @property
    def scratch_bytes(self) -> int:
        return 0 if self.straight else self.end - self.begin


@dataclass(frozen=True, slots=True)
class SliceFailure:
    """A run that could not be read, and why."""

    item: RunSlice
    layer: int
    error: StoreError
    bad_chunks: tuple[int, ...] = ()
    """Chunks of the run that are damaged, if it is known which."""
    opening: bool = False
    """Its file could not be opened."""

    @property
    def stripe(self) -> int:
        """Of the directory that it could not be read from."""
        return self.item.run.place.shape.stripe(self.layer)

    @property
    def error_number(self) -> int | None:
        """``errno`` of the system call that failed, if one did."""
        cause = self.error.__cause__
        return cause.errno if isinstance(cause, OSError) else None


@dataclass(frozen=True, slots=True)
class _Job:
    """One layer of a slice on its way."""

    item: RunSlice
    layer: int
    target: ByteArray
    """Where its bytes belong."""
    header: ByteArray
    payload: ByteArray
    """Where they arrive."""
    ops: tuple[IOOp, ...]


class LayerReader:
    """Stateless but for one scratch buffer a thread."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._scratch = ScratchPool()

    def read(self, slices: Sequence[RunSlice], into: Mapping[int, ByteArray]) -> list[SliceFailure]:
        """Read and verify layers of all ``slices``, each into its memory; returns what failed.

        Where a slice failed, its part of the memory holds anything.
        """
        jobs, failures = self._prepare(slices, into)
        outcomes = iter(self._transfers.run([op for job in jobs for op in job.ops]))
        for job in jobs:
            results = [next(outcomes) for _ in job.ops]
            if any(result.in_flight for result in results):
                self._scratch.discard()
            try:
                check_complete(job.ops, results)
                bad = _verify(job)
            except StoreError as error:
                # Its frames hold open files and memory, and whoever gets the error may keep it.
                failures.append(SliceFailure(job.item, job.layer, error.with_traceback(None)))
                continue
            if bad:
                damage = CorruptExtentError(f"the digest of layer {job.layer} does not match")
                failures.append(SliceFailure(job.item, job.layer, damage, bad))
            elif job.payload.ctypes.data != job.target.ctypes.data:
                job.target[:] = job.payload
        return failures

    def _prepare(
        self, slices: Sequence[RunSlice], into: Mapping[int, ByteArray]
    ) -> tuple[list[_Job], list[SliceFailure]]:
        wanted: list[tuple[RunSlice, int, ByteArray, OpenFile, _Plan]] = []
        failures: list[SliceFailure] = []
        # Asked for once, however many slices want it: one file is not several failures of its directory in a row.
        refused: dict[tuple[Segment, int], StoreError] = {}
        for layer, out in into.items():
            for item, target in _targets(slices, layer, out):
                segment, stripe = item.run.segment, item.run.place.shape.stripe(layer)
                if (segment, stripe) not in refused:
                    try:
                        file = segment.file(stripe)
                        wanted.append((item, layer, target, file, _plan(item, layer, target, file)))
                        continue
                    except StoreError as error:
                        refused[segment, stripe] = error.with_traceback(None)
                failures.append(SliceFailure(item, layer, refused[segment, stripe], opening=True))
        scratch = self._scratch.take(sum(BLOCK + plan.scratch_bytes for *_, plan in wanted))
        jobs: list[_Job] = []
        for item, layer, target, file, plan in wanted:
            header, scratch = scratch[:BLOCK], scratch[BLOCK:]
            bounce, scratch = scratch[: plan.scratch_bytes], scratch[plan.scratch_bytes :]
            landing = target if plan.straight else bounce
            ops = tuple(_ops(item, layer, plan, file, header, landing))
            payload = landing[plan.skip : plan.skip + target.size]
            jobs.append(_Job(item, layer, target, header, payload, ops))
        return jobs, failures


def _plan(item: RunSlice, layer: int, target: ByteArray, file: OpenFile) -> _Plan:
    """By the file itself: its directory may have come back with or without O_DIRECT since it was opened."""
    chunk_bytes = item.run.place.shape.chunk_layer_bytes[layer]
    begin, end = item.start * chunk_bytes, item.stop * chunk_bytes
    if not file.direct or (is_aligned(target) and chunk_bytes % BLOCK == 0):
        return _Plan(True, begin, end, 0)
    grid = begin // BLOCK * BLOCK
    return _Plan(False, grid, round_up(end), begin - grid)


def _targets(slices: Sequence[RunSlice], layer: int, out: ByteArray) -> Iterator[tuple[RunSlice, ByteArray]]:
    """Where each slice's bytes of a layer belong."""
    for item in slices:
        size = item.run.place.shape.chunk_layer_bytes[layer]
        yield item, out[item.first_key * size : (item.first_key + item.num_chunks) * size]


def _ops(
    item: RunSlice, layer: int, plan: _Plan, file: OpenFile, header: ByteArray, landing: ByteArray
) -> Iterator[IOOp]:
    """The header's block together with the first piece where they are neighbours, then the rest."""
    place = item.run.place
    stripe = place.shape.stripe(layer)
    base = place.extent_offset(layer)
    pieces = [landing[at : at + PIECE_BYTES] for at in range(0, plan.end - plan.begin, PIECE_BYTES)]
    first = pieces[:1] if plan.begin == 0 else []
    yield IOOp(IOKind.READ, stripe, file, base, (header, *first))
    for index in range(len(first), len(pieces)):
        offset = base + BLOCK + plan.begin + index * PIECE_BYTES
        yield IOOp(IOKind.READ, stripe, file, offset, (pieces[index],))


def _verify(job: _Job) -> tuple[int, ...]:
    """Chunks of the run whose bytes are wrong. Raises CorruptExtentError if the header is."""
    found = parse_header(job.header.data)
    check_header(found, job.item.run.place, job.layer)
    view, size = job.payload.data, found.chunk_bytes
    chunks = [view[at : at + size] for at in range(0, len(view), size)]
    return tuple(bad_chunks(found, chunks, job.item.start))
