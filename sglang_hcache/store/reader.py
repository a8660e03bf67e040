"""Reading one layer of some chunks: plan the transfers, run them as one batch, verify, copy what must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError, StoreError, StoreIOError
from sglang_hcache.store.catalog import RunSlice
from sglang_hcache.store.engine import IOEngine, IOKind, IOOp, IOResult
from sglang_hcache.store.geometry import BLOCK, round_up
from sglang_hcache.store.memory import ByteArray, ScratchPool, is_aligned
from sglang_hcache.store.record import check_digests, check_header, parse_header

PIECE_BYTES = 512 * 2**10
"""Largest single transfer: longer ones are split so that a device sees several at once."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How the bytes of one run slice travel."""

    straight: bool
    """Payload goes right into the caller's memory; otherwise through scratch memory."""
    begin: int
    """First payload byte to read, counted from the payload's start."""
    end: int
    skip: int
    """Bytes read before the first one wanted."""

    @property
    def scratch_bytes(self) -> int:
        return 0 if self.straight else self.end - self.begin


def plan_slice(start: int, stop: int, chunk_bytes: int, *, direct: bool, aligned: bool) -> SlicePlan:
    """The payload range that covers chunks ``[start, stop)``.

    ``direct``: the file wants aligned transfers. ``aligned``: the destination's memory is.
    """
    begin, end = start * chunk_bytes, stop * chunk_bytes
    if not direct or (aligned and chunk_bytes % BLOCK == 0):
        return SlicePlan(True, begin, end, 0)
    grid = begin // BLOCK * BLOCK
    return SlicePlan(False, grid, round_up(end), begin - grid)


def pieces(begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` in pieces of at most ``piece_bytes``."""
    for at in range(begin, end, piece_bytes):
        yield at, min(at + piece_bytes, end)


@dataclass(frozen=True, slots=True)
class SliceFailure:
    """A run that could not be read, and why."""

    item: RunSlice
    error: StoreError

    @property
    def error_number(self) -> int | None:
        """``errno`` of the system call that failed, if one did."""
        cause = self.error.__cause__
        return cause.errno if isinstance(cause, OSError) else None


class LayerReader:
    """Stateless but for one scratch buffer a thread."""

    def __init__(self, engine: IOEngine, direct: Sequence[bool]) -> None:
        self._engine = engine
        self._direct = direct
        self._scratch = ScratchPool()

    def read(self, slices: Sequence[RunSlice], layer: int, out: ByteArray) -> list[SliceFailure]:
        """Read and verify ``layer`` of all ``slices`` into ``out``; returns what failed.

        Where a slice failed, its part of ``out`` holds anything.
        """
        chunk_bytes = slices[0].run.place.shape.chunk_layer_bytes[layer]
        targets = [
            out[item.first_key * chunk_bytes : (item.first_key + item.num_chunks) * chunk_bytes]
            for item in slices
        ]
        plans = [
            plan_slice(
                item.start,
                item.stop,
                chunk_bytes,
                direct=self._direct[item.run.place.shape.stripe(layer)],
                aligned=is_aligned(target),
            )
            for item, target in zip(slices, targets, strict=True)
        ]
        scratch = self._scratch.take(sum(BLOCK + plan.scratch_bytes for plan in plans))
        ops: list[IOOp] = []
        jobs: list[tuple[RunSlice, ByteArray, ByteArray, ByteArray, range]] = []
        failures: list[SliceFailure] = []
        for item, target, plan in zip(slices, targets, plans, strict=True):
            header, scratch = scratch[:BLOCK], scratch[BLOCK:]
            bounce, scratch = scratch[: plan.scratch_bytes], scratch[plan.scratch_bytes :]
            landing = target if plan.straight else bounce
            try:
                new = list(self._ops(item, layer, plan, header, landing))
            except OSError as error:
                reason = StoreIOError(f"cannot open a segment file: {error}")
                reason.__cause__ = error
                failures.append(SliceFailure(item, reason))
                continue
            payload = landing[plan.skip : plan.skip + target.size]
            jobs.append((item, target, header, payload, range(len(ops), len(ops) + len(new))))
            ops += new
        results = self._engine.run(ops) if ops else []
        for item, target, header, payload, numbers in jobs:
            try:
                _check_results((ops[number], results[number]) for number in numbers)
                _verify(item, layer, header, payload, chunk_bytes)
            except StoreError as error:
                failures.append(SliceFailure(item, error))
                continue
            if payload.ctypes.data != target.ctypes.data:
                target[:] = payload
        return failures

    def _ops(
        self, item: RunSlice, layer: int, plan: SlicePlan, header: ByteArray, landing: ByteArray
    ) -> Iterator[IOOp]:
        """The header's block together with the first piece where they are neighbours, then the rest."""
        place = item.run.place
        stripe = place.shape.stripe(layer)
        fd = item.run.segment.fd(stripe)
        base = place.extent_offset(layer)

        def read(offset: int, *buffers: ByteArray) -> IOOp:
            return IOOp(IOKind.READ, stripe, fd, self._direct[stripe], offset, buffers)

        parts = [
            (begin, landing[begin - plan.begin : end - plan.begin])
            for begin, end in pieces(plan.begin, plan.end, PIECE_BYTES)
        ]
        if plan.begin == 0:
            yield read(base, header, parts.pop(0)[1])
        else:
            yield read(base, header)
        for begin, buffer in parts:
            yield read(base + BLOCK + begin, buffer)


def _check_results(outcomes: Iterable[tuple[IOOp, IOResult]]) -> None:
    for op, result in outcomes:
        if result.error is not None:
            raise StoreIOError(f"read failed: {result.error}") from result.error
        if result.done_bytes != op.size:
            raise CorruptExtentError(f"the file ends after {result.done_bytes} of {op.size} bytes")


def _verify(item: RunSlice, layer: int, header: ByteArray, payload: ByteArray, chunk_bytes: int) -> None:
    found = parse_header(header.data)
    check_header(found, item.run.place.header(layer))
    view = payload.data
    chunks = [view[at : at + chunk_bytes] for at in range(0, len(view), chunk_bytes)]
    check_digests(found, chunks, item.start)
