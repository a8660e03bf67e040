"""Requests whose rows are being collected, and the chunk that each of them fills."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_hcache.capture.beginnings import Beginnings, ChunkInMaking
from sglang_hcache.capture.chunk_rows import ChunkRows, PassRows, SingleRows
from sglang_hcache.capture.copiers import Copiers
from sglang_hcache.capture.events import RequestBegins, RequestRows
from sglang_hcache.core.keys import ChunkKey, chunk_keys, next_key, token_bytes
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_COPIED_TOGETHER = 8
"""Whole chunks, at most, that several threads copy before the first of them is sealed: to hand them work takes a tenth
of a millisecond, and more where the interpreter is busy."""

_SHARE_SEALED = 1 / 8
"""When so much of host memory was filled, it is told again what running requests use."""


@dataclass(slots=True)
class _OpenRequest:
    """One request's chunk in the making.

    Args:
        keys: of the whole chunks before it.
        complete: every row so far has been copied.
        has_gap: a chunk before this one was dropped. A look-up ends there, so nothing behind it is saved.
    """

    namespace_id: bytes
    keys: list[ChunkKey]
    chunk: ChunkInMaking
    complete: bool = True
    has_gap: bool = False

    @property
    def next_position(self) -> int:
        return len(self.keys) * CHUNK_TOKENS + len(self.chunk.tokens)


class OpenRequests:
    """All calls come from the assembler's thread, but for what :class:`.Beginnings` allows.

    Args:
        tiers: where chunks go.
        copiers: copy what is large; closed with this.
    """

    def __init__(self, tiers: TieredStore, observer: Observer, copiers: Copiers) -> None:
        self._tiers = tiers
        self._observer = observer
        self._rows = ChunkRows(tiers.host, copiers)
        self._may_warn = Throttle()
        self.beginnings = Beginnings(tiers.host)
        self._open: dict[str, _OpenRequest] = {}
        self._copies: list[Callable[[], None]] = []
        """Of one request's whole chunks, for several threads."""
        self._to_seal: deque[tuple[int, ChunkInfo]] = deque()
        """Slots that get all of their rows by those."""
        self._num_sealed = 0
        """Since :meth:`_keep_heads`."""

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """None gets more rows, and nothing is kept of chunks that are not whole."""
        self.end_all()
        self.beginnings.clear()
        self._rows.close()

    def begin(self, event: RequestBegins) -> None:
        """Its rows follow; an earlier request of that id is over."""
        self.end(event.rid)
        root = event.namespace.root_key()
        keys = chunk_keys(root, event.prefix)
        chunk = ChunkInMaking(keys[-1] if keys else root)
        request = _OpenRequest(event.namespace.namespace_id(), keys, chunk)
        self._open[event.rid] = request
        tail = event.prefix[len(keys) * CHUNK_TOKENS :]
        if tail:
            chunk.tokens = tail
            chunk.slot = self.beginnings.adopt(chunk.parent, tail)
            if chunk.slot is None:
                self._copy_beginning(request, tail)
        if request.complete:
            self.beginnings.add(chunk)

    def _copy_beginning(self, request: _OpenRequest, tail: array[int]) -> None:
        """The rows of ``tail``, on the device already, into the request's first chunk."""
        chunk = request.chunk
        with self.beginnings.rows_of(chunk.parent, tail) as source:
            if source is None:
                self._drop_chunk(request, "capture.chunks_dropped_beginning_gone")
                return
            # While the rows are held: making room for the copy must not throw them away.
            chunk.slot = self._reserve(request)
            if chunk.slot is not None:
                self._rows.copy_beginning(source, chunk.slot, len(tail))
                return
        chunk.slot = self.beginnings.adopt(chunk.parent, tail, if_longer=True)
        if chunk.slot is None:
            self._drop_for_want_of_slots(request)

    def add_pass(self, requests: Sequence[RequestRows], taken: PassRows) -> None:
        """The rows of one forward pass; those of nobody here are passed over."""
        self.beginnings.give_old_back()
        singles = SingleRows()
        whole: list[_OpenRequest] = []
        for rows in requests:
            request = self._open.get(rows.rid)
            if request is None:
                continue
            if rows.position != request.next_position:
                # Rows of another life of this request id, or a gap: nothing after it can be placed.
                self._observer.count("capture.requests_out_of_order")
                self.end(rows.rid)
            elif rows.count > 1:
                self._add_rows(request, rows, taken)
            elif self._add_single(request, rows.row, taken, singles):
                whole.append(request)
        self._rows.copy_singles(taken, singles)
        for request in whole:
            self._seal(request)
            self._finish()  # the next one may end the same chunk
        # With a disk the heads are there, and are written first.
        host = self._tiers.host
        if not host.keep_dirty and self._num_sealed > _SHARE_SEALED * host.num_slots:
            self._keep_heads()

    def _keep_heads(self) -> None:
        """Of requests that run for long: with a tail that is new, their head would be evicted first, and the tail be of
        no use.
        """
        self._num_sealed = 0
        # Many may share a beginning. Of two chunks of one prefix the head is named first.
        keys = dict.fromkeys(key for request in self._open.values() for key in request.keys)
        self._tiers.host.touch(list(keys), is_reuse=False)

    def _add_single(self, request: _OpenRequest, row: int, taken: PassRows, singles: SingleRows) -> bool:
        """One row, as each pass brings of a request that decodes; copied with those of others.

        Returns:
            Whether the chunk is to be sealed once it is.
        """
        chunk = request.chunk
        place = len(chunk.tokens)
        chunk.tokens.append(taken.tokens[row])
        slot = self._slot_for(request, taken, row, place, 1) if request.complete else None
        if slot is not None:
            singles.add(row, slot, place)
        return place + 1 == CHUNK_TOKENS

    def _add_rows(self, request: _OpenRequest, rows: RequestRows, taken: PassRows) -> None:
        done = 0
        while done < rows.count:
            filled = len(request.chunk.tokens)
            count = min(CHUNK_TOKENS - filled, rows.count - done)
            first = rows.row + done
            request.chunk.tokens.extend(taken.tokens[first : first + count])
            if self._is_worth_copying(request):
                slot = self._slot_for(request, taken, first, filled, count)
                if slot is not None and count == CHUNK_TOKENS:
                    self._copies.append(partial(self._rows.copy, taken, slot, first, filled, count))
                elif slot is not None:
                    self._rows.copy(taken, slot, first, filled, count)
            if len(request.chunk.tokens) == CHUNK_TOKENS:
                self._seal(request)
            # 0: a chunk that was begun earlier is whole. If another request was faster, its slot is free again.
            if len(self._copies) in (0, _COPIED_TOGETHER):
                self._finish()
            done += count
        self._finish()

    def _finish(self) -> None:
        """Make the copies, and seal what is whole then."""
        copies, self._copies = self._copies, []
        self._rows.carry_out(copies)
        self._num_sealed += len(self._to_seal)
        while self._to_seal:
            self._tiers.seal(*self._to_seal.popleft())

    def _is_worth_copying(self, request: _OpenRequest) -> bool:
        """False once rows are missing, or if the whole chunk just arrived and is in host memory already.

        One that is on disk alone was computed again because that was faster than to read it, and will be again.
        """
        chunk = request.chunk
        if chunk.slot is None and request.complete and len(chunk.tokens) == CHUNK_TOKENS:
            return next_key(chunk.parent, token_bytes(chunk.tokens)) not in self._tiers.host
        return request.complete

    def _slot_for(
        self, request: _OpenRequest, taken: PassRows, first: int, place: int, count: int
    ) -> int | None:
        """Where rows [first, first + count) of the pass go, rows [place, place + count) there; None: they are lost."""
        if first + count > taken.count:
            self._drop_chunk(request, taken.why_dropped)
            return None
        chunk = request.chunk
        if not place:
            chunk.slot = self._reserve(request)  # noted before the copy: after an error it is given back
            if chunk.slot is None:
                self._drop_for_want_of_slots(request)
        return chunk.slot

    def _reserve(self, request: _OpenRequest) -> int | None:
        """A slot to fill, if need be that of an unfinished chunk; behind the chunk before it where that can be."""
        behind = self._to_seal[-1][0] if self._to_seal else self._tiers.host.slot_of(request.chunk.parent)
        slot = self._tiers.host.reserve(behind)
        if slot is None and self._to_seal:
            self._finish()  # then one of those may go
            slot = self._tiers.host.reserve(behind)
        if slot is None:
            self.beginnings.give_one_back()
            slot = self._tiers.reserve(behind)  # which may wait for the disk
        return slot

    def _seal(self, request: _OpenRequest) -> None:
        chunk = request.chunk
        key = next_key(chunk.parent, token_bytes(chunk.tokens))
        if chunk.slot is not None:
            info = ChunkInfo(key, chunk.parent, len(request.keys), request.namespace_id)
            self._to_seal.append((chunk.slot, info))
        elif key not in self._tiers:
            if request.has_gap:
                self._observer.count("capture.chunks_dropped_behind_another")
            request.has_gap = True
        if request.complete:
            self.beginnings.mark_filled(chunk, key)
        request.keys.append(key)
        request.chunk, request.complete = ChunkInMaking(key), not request.has_gap
        if request.complete:
            self.beginnings.add(request.chunk)

    def _drop_for_want_of_slots(self, request: _OpenRequest) -> None:
        self._drop_chunk(request, "capture.chunks_dropped_host_full")
        if self._may_warn():
            logger.warning(
                "hcache: host memory is full, so chunks are not saved (more may follow): %s; a larger "
                "--hcache-host-size helps",
                "the disk takes fewer chunks than are computed"
                if self._tiers.may_have_disk
                else "requests and restores use all of it",
            )

    def _drop_chunk(self, request: _OpenRequest, reason: str) -> None:
        self._observer.count(reason)
        request.complete = False
        self.beginnings.drop(request.chunk)

    def end(self, rid: str) -> None:
        """No more rows of it come. It need not be here."""
        request = self._open.pop(rid, None)
        if request is not None:
            self.beginnings.take_over(request.chunk)
            self._tiers.host.touch(request.keys, is_reuse=False)

    def end_all(self) -> None:
        """No more rows of any of them come."""
        for rid in list(self._open):
            self.end(rid)

    def drop_all(self) -> None:
        """End all requests, and keep nothing of chunks whose rows may not be what their tokens say."""
        for request in self._open.values():
            self.beginnings.drop(request.chunk)
        self._open.clear()
        self._copies.clear()
        while self._to_seal:
            self._tiers.host.release(self._to_seal.popleft()[0])
