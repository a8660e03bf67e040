"""The restores that run, and what they hold."""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.sglang_plugin.seam.ranks import Ranks
from sglang_hcache.sglang_plugin.serving.tickets import Restore

_WAIT_MS = 5


class Running:
    """Restores that are not over, oldest first.

    Everything runs on the scheduler's thread, except :meth:`one_has_changed`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._restores: dict[Restore, None] = {}
        self._keys: dict[ChunkKey, dict[Restore, None]] = {}
        """Chunk -> who brings it, oldest first: where that pays sooner, several do."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)
        self.tokens = 0
        """Slots that they hold, which are neither free nor in the tree. Kept, not added up: each of hundreds that start
        in one round asks for it."""
        self._predicted_s = 0.0
        """What all of them take, from the first one's beginning on."""

    def __len__(self) -> int:
        return len(self._restores)

    def __iter__(self) -> Iterator[Restore]:
        return iter(list(self._restores))

    def __contains__(self, restore: Restore) -> bool:
        return restore in self._restores

    def add(self, restore: Restore) -> None:
        """It starts."""
        self._restores[restore] = None
        for key in restore.job.keys:
            self._keys.setdefault(key, {})[restore] = None
        self.tokens += restore.job.num_tokens
        self._predicted_s += _predicted_s(restore)

    def first_with(self, key: ChunkKey) -> Restore:
        """The one that brings this chunk first. Raises KeyError if none does."""
        return next(iter(self._keys[key]))

    def leading(self, keys: Sequence[ChunkKey]) -> int:
        """How many of ``keys``, chunks of one prompt in order, they bring from the first one on."""
        if not keys or keys[0] not in self._keys:
            return 0
        return bisect_left(keys, True, key=lambda key: key not in self._keys)

    @property
    def backlog_s(self) -> float:
        """Predicted seconds until all of them are over: one that starts now comes behind them."""
        return max(0.0, self._predicted_s - self._done_s)

    def left_s(self, last: Restore) -> float:
        """Predicted seconds until this one of them is over."""
        total_s = 0.0
        for restore in self._restores:
            total_s += _predicted_s(restore)
            if restore is last:
                break
        return max(0.0, total_s - self._done_s)

    @property
    def _done_s(self) -> float:
        """Those of the predicted seconds that have passed: restores run one after the other.

        One that takes longer than predicted is expected to take as long again as it is late, up to its deadline: below
        0 then. A disk that has become slow must not let those behind it start as if their turn came at once.
        """
        first = next(iter(self._restores), None)
        if first is None:
            return 0.0
        predicted_s, job, now = _predicted_s(first), first.job, time.monotonic()
        late_s = max(0.0, now - max(job.started, job.fenced_until)) - predicted_s
        left_s = -late_s if late_s <= 0 else max(0.0, min(late_s, job.deadline_s - job.taken_s(now)))
        return predicted_s - left_s

    def newest(self) -> Restore | None:
        """The one that started last, of those that hold slots."""
        return next((restore for restore in reversed(self._restores) if not restore.is_in_tree), None)

    def take_certain(self) -> list[Restore]:
        """Those that somebody wants, and that are certain to come to their end on all ranks: their slots are the tree's
        now. Each stays until it is over.
        """
        # All ranks have to ask about the same restores, so how far a job is here must not decide which.
        restores = [restore for restore in self._restores if restore.ticket and not restore.is_in_tree]
        agreed = self._ranks.minimum(*(restore.is_certain for restore in restores)) if restores else ()
        certain = [restore for restore, is_certain in zip(restores, agreed, strict=True) if is_certain]
        for restore in certain:
            restore.is_in_tree = True
            self._forget_slots(restore)
        return certain

    def take_ended(self) -> list[Restore]:
        """Take out those to whose slots nothing writes any more, on any rank; the caller alone has them then."""
        restores = list(self._restores)
        for restore in filter(_has_failed, restores):
            restore.abandon()
        over = [restore.is_over for restore in restores]
        # Asked after the other: of one that is over it is final.
        well = [not _has_failed(restore) for restore in restores]
        agreed = self._ranks.minimum(*over, *well)
        ended = []
        for restore, is_well, all_over, all_well in zip(
            restores, well, agreed[: len(over)], agreed[len(over) :], strict=True
        ):
            if not all_well:
                # For good: it is stopped here now, and looks like one that has failed in the next round.
                restore.missing_elsewhere |= is_well
                restore.failed_elsewhere |= is_well and restore.ticket is not None
                restore.abandon()
            if all_over:
                ended.append(restore)
        for restore in ended:
            del self._restores[restore]
            if not restore.is_in_tree:
                self._forget_slots(restore)
            # If there are none, the sum is 0, and the rest is from rounding.
            self._predicted_s = self._predicted_s - _predicted_s(restore) if self._restores else 0.0
        return ended

    def _forget_slots(self, restore: Restore) -> None:
        for key in restore.job.keys:
            del self._keys[key][restore]
            if not self._keys[key]:
                del self._keys[key]
        self.tokens -= restore.job.num_tokens

    # -- waiting ---------------------------------------------------------------------------------

    def one_has_changed(self) -> None:
        """A job is over, or certain to come to its end (engine's thread)."""
        os.eventfd_write(self._bell, 1)

    def wait(self, doze: Callable[[int], object] | None = None) -> None:
        """Wait a moment for a job to be over, or certain.

        Args:
            doze: does so until a file descriptor can be read, or something else comes.
        """
        (doze or _doze)(self._bell)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    @property
    def is_recomputing(self) -> bool:
        """Whether layers of one are left to be computed on the scheduler's thread."""
        return any(restore.is_recomputing for restore in self._restores)


def _doze(bell: int) -> None:
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.poll(_WAIT_MS)


def _has_failed(restore: Restore) -> bool:
    return restore.job.is_over and restore.job.state is not RestoreState.DONE


def _predicted_s(restore: Restore) -> float:
    decision = restore.decision
    if decision is None:
        return 0.0
    # One that is only tried is given up when recomputing would have been over.
    return decision.recompute_s if decision.is_try else decision.restore_s
