"""The demoter: a thread that moves chunks from host memory to the disk, so that slots can be used again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sglang_hcache.core.errors import StoreError, StoreFullError, WriteBudgetError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.tier.chunk import ChunkInfo, form_runs
from sglang_hcache.tier.host import HostTier, SlotCounts

logger = logging.getLogger(__name__)

_SPARE_SHARE = 1 / 8  # of the host slots: so many are kept free, or clean and not pinned
_TICK_S = 0.5
_REST_S = 5.0  # after an error or a full disk, before what should be on disk at once is tried again
_BUDGET_WARNING_S = 600.0  # it lasts for hours
_WAIT_FOR_SLOT_S = 0.5
_CLOSE_S = 3.0
_MOST_REQUESTS = 4096
_MOST_WAITING_TOKENS = 2**22  # 32 MiB of evicted prefixes


ChunkSource = Callable[[], Iterable[ChunkKey]]
"""Computes the keys of chunks to demote; called on the demoter's thread."""


class Demoter:
    """Owns the writing side of ``disk``. Every method is safe from any thread.

    Args:
        run_chunks: most chunks of one disk run.
        eager: whether to write every chunk as soon as it is sealed; else those that are asked for, and the oldest when
            slots run short. Asked at least every half second: a signal's handler may change the answer.
    """

    def __init__(
        self, host: HostTier, disk: DiskStore, observer: Observer, run_chunks: int, eager: Callable[[], bool]
    ) -> None:
        self._host = host
        self._disk = disk
        self._observer = observer
        self._run_chunks = run_chunks
        self._eager = eager
        self._resting_until = 0.0
        self._may_warn = Throttle()
        self._may_warn_of_budget = Throttle(_BUDGET_WARNING_S)
        self._may_trace = Throttle()
        self._spare_slots = max(1, int(host.num_slots * _SPARE_SHARE))
        self._changed = threading.Condition()
        """There is work, or slots were made clean, or nothing is left to do."""
        self._requests: deque[ChunkSource] = deque()
        self._waiting_tokens = 0
        self._keeps_up = True
        self._busy = False
        self._clear_at: float | None = None
        """When clearing is tried next, by the monotonic clock; 0 before the first try, None: all is cleared."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hcache-demoter", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether there is work."""
        with self._changed:
            return self._busy or self._may_clear() or self._has_work()

    @property
    def is_clearing(self) -> bool:
        """Whether what is on disk must count as gone already."""
        return self._clear_at is not None

    @property
    def takes_writes(self) -> bool:
        """Whether a chunk that is used again may be written now: there is budget, and nothing failed a moment ago."""
        sizes = self._host.layout.chunk_layer_bytes
        return not self._is_resting() and self._disk.admits(1, sizes, reused=True)

    def request(self, keys: ChunkSource, num_tokens: int = 0) -> None:
        """Write those of the chunks ``keys()`` that exist only in host memory. Never waits.

        Args:
            num_tokens: that ``keys`` holds in memory. What holds none is never dropped.
        """
        with self._changed:
            tokens = self._waiting_tokens + num_tokens
            if num_tokens and (len(self._requests) >= _MOST_REQUESTS or tokens > _MOST_WAITING_TOKENS):
                # The disk does not keep up. Those chunks stay dirty, and go when slots run short.
                self._observer.count("demote.requests_dropped")
                return
            self._requests.append(keys)
            self._waiting_tokens = tokens
            self._changed.notify_all()

    def look(self) -> None:
        """A chunk was sealed: begin now if it has to be written, or if slots are short."""
        if self._is_behind() or self._is_short_of_slots():
            with self._changed:
                self._changed.notify_all()

    def wait_for_slot(self) -> int | None:
        """A host slot as soon as one is clean, or None. Waits a moment, but not for a disk that hangs."""
        if not self._keeps_up:
            return None
        slot = None
        deadline = time.monotonic() + _WAIT_FOR_SLOT_S
        with self._changed:
            self._changed.notify_all()  # once: the thread answers, also if there is nothing that it could write
            while slot is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
                slot = self._host.reserve()
            # A disk that hangs must not hold up every chunk; its next completed run ends this.
            self._keeps_up = slot is not None
        return slot

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False if time ran out first."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self.is_busy, timeout_s)
            return not self.is_busy

    def rest(self, until: float) -> bool:
        """Wait until what could not be written may be tried again; False, at once, if that is not before ``until``."""
        resting_until = self._resting_until
        if resting_until >= until:
            return False
        time.sleep(max(0.0, resting_until - time.monotonic()))
        return time.monotonic() < until

    def clear_disk(self) -> None:
        """Empty the disk, also if :meth:`close` comes first, and forget what was asked before. Never waits.

        While no directory takes the note of it, it is tried again and again.
        """
        with self._changed:
            self._forget_requests()
            self._clear_at = self._clear_at or 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Stop after the run that is being written; does not wait for a disk that hangs. Idempotent."""
        with self._changed:
            self._stopping = True
            self._forget_requests()
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not (self._stopping or self._may_clear() or self._has_work()):
                    self._changed.notify_all()
                    self._changed.wait(_TICK_S)
                if self._stopping and not self._may_clear():
                    return
                self._busy = True
            try:
                if self._may_clear():
                    self._clear()
                else:
                    self._demote(self._wanted())
            except Exception:
                # The thread must outlive anything: what could not be written stays in host memory or is dropped.
                if self._may_trace():
                    logger.exception("hcache: demotion failed")
                self._observer.count("demote.errors")
                self._resting_until = time.monotonic() + _REST_S
                if self._stopping:
                    return
                time.sleep(_TICK_S)

    def _has_work(self) -> bool:
        return bool(self._requests) or self._is_behind() or self._is_short_of_slots()

    def _is_behind(self) -> bool:
        """Whether something should be on disk already, and may be tried."""
        return self._eager() and not self._is_resting() and bool(self._host.counts().dirty)

    def _is_resting(self) -> bool:
        """Whether something could not be written a moment ago."""
        return time.monotonic() < self._resting_until

    def _is_short_of_slots(self) -> bool:
        """Whether few slots can be used again, and more could if they were written. What is pinned cannot."""
        counts = self._host.counts(pinned=False)
        return bool(counts.dirty) and self._are_few(counts)

    def _are_few(self, counts: SlotCounts) -> bool:
        return counts.free + counts.clean < self._spare_slots

    def _may_clear(self) -> bool:
        return self._clear_at is not None and time.monotonic() >= self._clear_at

    def _clear(self) -> None:
        is_first_try = not self._clear_at
        try:
            self._disk.clear()
        except StoreError as error:
            if is_first_try:
                logger.warning("hcache: the clear is tried again until it is durable: %s", error)
            self._clear_at = time.monotonic() + _TICK_S
            return
        if not is_first_try:
            logger.info("hcache: the clear is durable now")
        with self._changed:
            self._clear_at = None  # whoever asked meanwhile is served, too: nobody else writes to the disk

    def _forget_requests(self) -> None:
        self._requests.clear()
        self._waiting_tokens = 0

    def _wanted(self) -> dict[ChunkKey, ChunkInfo]:
        """What was asked for and still has to be written."""
        with self._changed:
            requests = list(self._requests)
            self._forget_requests()
        return {
            info.key: info
            for request in requests
            for key in request()
            if (info := self._host.dirty_info(key)) is not None
        }

    def _demote(self, chunks: dict[ChunkKey, ChunkInfo]) -> None:
        """Write ``chunks``, and all others that have to be written now."""
        more: list[ChunkInfo] = []
        if self._is_behind():
            more = self._host.oldest_dirty(self._host.num_slots)
        elif self._is_short_of_slots():
            # Of a disk that took nothing a moment ago little is asked: it is asked again for each slot that is needed.
            count = self._run_chunks if self._is_resting() else max(self._spare_slots, self._run_chunks)
            more = self._host.oldest_dirty(count, pinned=False)
        chunks.update((info.key, info) for info in more)
        runs = [*form_runs(chunks.values(), self._run_chunks)]
        sizes = self._host.layout.chunk_layer_bytes
        # Headers of a run take less than one more chunk.
        if not self._eager() and self._disk.admits(len(chunks) + len(runs), sizes, reused=False):
            # The oldest prefix first, and its tail before its head: what is written first is evicted first, in memory
            # and on disk. Not where time or the write budget may run out meanwhile: no tail is found without its head.
            runs.reverse()
        # Before that what was used again: it must not find the write budget used up by what was not.
        for run in sorted(runs, key=lambda run: not self._host.is_reused(run[0].key)):
            if self._stopping or self._may_clear() or not self._write_run(run):
                return

    def _write_run(self, run: Sequence[ChunkInfo]) -> bool:
        """Write one run; a chunk that cannot be written is given up, so that its slot can be used again.

        Not before the slot is needed: the disk may be well again, or have room, when it is tried next.

        Returns:
            False if there is no room on disk, for this one and so for others: they are not tried now.
        """
        is_settled, is_full = True, False
        dirty = [info for info in run if self._host.dirty_info(info.key)]  # what was not given up meanwhile
        pinned = [(info, slot) for info in dirty if (slot := self._host.pin(info.key)) is not None]
        try:
            for piece in _consecutive(self._not_on_disk(pinned)):
                self._write_within_budget(piece)
        except StoreError as error:
            is_full = isinstance(error, StoreFullError)
            is_settled = self._is_given_up(error, len(self._not_on_disk(pinned)))
        except Exception:
            # It may come each time: not tried again.
            self._observer.count("demote.chunks_dropped_error", len(self._not_on_disk(pinned)))
            raise
        finally:
            for info, slot in reversed(pinned):  # in the order of their last uses
                if is_settled:
                    self._host.mark_clean(info.key, slot)
                self._host.unpin(info.key, slot)
            with self._changed:
                self._keeps_up = True
                self._changed.notify_all()
        return is_settled or not is_full

    def _not_on_disk(self, chunks: Sequence[tuple[ChunkInfo, int]]) -> list[tuple[ChunkInfo, int]]:
        return [item for item in chunks if not self._disk.contains(item[0].key)]

    def _is_given_up(self, error: StoreError, count: int) -> bool:
        """Tell of ``count`` chunks that could not be written for ``error``; False if they may be tried again."""
        is_full = isinstance(error, StoreFullError)
        if self._may_warn():
            problem = "no room on disk for" if is_full else "could not write"
            logger.warning(
                "hcache: %s %d chunks (more may follow): %s; they stay in memory and are tried again",
                problem, count, error,
            )  # fmt: skip
        self._observer.count("demote.runs_failed")
        self._resting_until = time.monotonic() + _REST_S
        is_given_up = self._are_few(self._host.counts(pinned=False))
        if is_given_up:
            self._observer.count(
                "demote.chunks_dropped_full" if is_full else "demote.chunks_dropped_error", count
            )
        return is_given_up

    def _write_within_budget(self, piece: Sequence[tuple[ChunkInfo, int]]) -> None:
        """Write consecutive chunks; when the write budget runs short, those that were used again, and of the others as
        many as fit: then there is no room for what is behind them, either.
        """
        # A prefix that was used again begins with its first chunk, so what was not is the tail.
        keep = sum(1 for _ in itertools.takewhile(lambda item: self._host.is_reused(item[0].key), piece))
        sizes = self._host.layout.chunk_layer_bytes
        while keep < len(piece) and self._disk.admits(keep + 1, sizes, reused=False):
            keep += 1
        if keep:
            infos, slots = zip(*piece[:keep], strict=True)
            run = Run(infos[0].namespace_id, tuple(info.key for info in infos), infos[0].index, sizes)
            try:
                self._disk.write_run(run, lambda layer: [self._host.layer_of(slot, layer) for slot in slots])
                self._observer.count("demote.chunks_written", keep)
            except WriteBudgetError:
                keep = 0
        if keep < len(piece):
            self._observer.count("demote.chunks_dropped_budget", len(piece) - keep)
            if self._may_warn_of_budget():
                told = "not written to disk (more may follow): no room in the write budget (--hcache-disk-write-budget)"
                logger.warning("hcache: %d chunks are %s", len(piece) - keep, told)


def _consecutive(chunks: Sequence[tuple[ChunkInfo, int]]) -> list[list[tuple[ChunkInfo, int]]]:
    """Split where a chunk in the middle is on disk already."""
    pieces: list[list[tuple[ChunkInfo, int]]] = []
    for item in chunks:
        if pieces and pieces[-1][-1][0].key == item[0].parent:
            pieces[-1].append(item)
        else:
            pieces.append([item])
    return pieces
