"""One restore as a state machine.

::

    QUEUED -- engine begins it --> RUNNING --+--> CERTAIN ---> DONE   every layer verified and written
       |                                     +--> FAILED              an error, or its deadline passed
       '-------------------------------------+--> CANCELLED           nobody wants it any more

CERTAIN: every layer was verified, and all that is left is queued on a GPU. Nothing can fail any more, short of an error
of CUDA's, and what the device does behind :attr:`RestoreJob.written` finds K and V. On a CPU it is left out.

The engine's thread moves the state, but for one: a job that is cancelled before it began is over at once, however long
those before it take. Slots may be used again once :attr:`RestoreJob.is_over` is true, or behind ``written``.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_hcache.core.errors import RestoreCancelledError, RestoreTimeoutError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.device.streams import Mark
from sglang_hcache.restore.behind import Written
from sglang_hcache.tier.tiered import ChunkLease

_LOOK_AGAIN_S = 0.0005
"""Whether the device has passed a fence: a wait for it could not be cancelled."""


class RestoreState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    CERTAIN = "certain"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class RestoreJob:
    """Bring leased chunks into ``slots``.

    Args:
        blocks: the chunks of one prefix in order, in leases that are read at a time; closed when the job is over.
        first_position: position of the first token, a multiple of 64.
        slots: (tokens,) int64 device slots, one a token of the leased chunks.
        deadline_s: seconds from submission, or from where the device has passed ``fence``, after which the restore is
            abandoned: recomputing would wait for the device as well.
        layers: the layers to bring back, in the order in which they are read. Somebody else computes the others.
        fence: what the device may still do with the slots, for whoever had them before; None: nothing.
    """

    blocks: tuple[ChunkLease, ...]
    first_position: int
    slots: torch.Tensor
    deadline_s: float
    layers: tuple[int, ...]
    fence: Mark | None = None
    state: RestoreState = RestoreState.QUEUED
    error: BaseException | None = None
    written: Written | None = None
    """When the device has written all of it; known from CERTAIN on."""
    submitted: float = field(default_factory=time.monotonic)
    started: float = math.inf
    """When the engine began with it."""
    ended: float = math.inf
    """When the engine was done with it."""
    fenced_until: float = 0.0
    """When the device was last seen to be before ``fence``."""
    seconds: float = 0.0
    """From the first read to the last layer, less what it waited for ``fence``."""
    fenced_s: float = 0.0
    """What it waited for that."""
    waited_s: float = 0.0
    """Part of these seconds: waiting for reads."""
    written_s: float = 0.0
    """Part of these seconds: writing K and V."""
    _cancelled: Future[None] = field(default_factory=Future)
    _leaves_queue: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def queued_s(self) -> float:
        """Seconds that it waited until the engine began with it."""
        return self.started - self.submitted

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The chunks, in order."""
        return tuple(key for block in self.blocks for key in block.keys)

    @property
    def sources(self) -> tuple[str, ...]:
        """The tier of each chunk."""
        return tuple(source for block in self.blocks for source in block.sources)

    @property
    def copied_s(self) -> float:
        """Seconds, of all reading threads together, in which chunks were copied to host memory as well."""
        return sum(block.copied_s for block in self.blocks)

    @property
    def is_over(self) -> bool:
        return self.state in (RestoreState.DONE, RestoreState.FAILED, RestoreState.CANCELLED)

    @property
    def is_certain(self) -> bool:
        """Whether every layer was verified, and is in the slots or will be behind ``written``."""
        return self.state in (RestoreState.CERTAIN, RestoreState.DONE)

    def begin(self) -> bool:
        """The engine begins with it; False if it was cancelled before."""
        with self._leaves_queue:
            if self.state is RestoreState.QUEUED:
                self.state = RestoreState.RUNNING
        return self.state is RestoreState.RUNNING

    def ask(self, written: Written) -> None:
        """The device is asked for all of it, up to ``written``: it goes on to its end.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job must not go on.
        """
        self.check()
        self.written, self.state = written, RestoreState.CERTAIN

    def cancel(self) -> None:
        """Stop before the next layer, also one that is being read. The job is over only when its state says so."""
        with contextlib.suppress(InvalidStateError):  # it was stopped before
            self._cancelled.set_result(None)
        with self._leaves_queue:
            has_begun = self.state is not RestoreState.QUEUED
            if not has_begun:
                self.state = RestoreState.CANCELLED
        if not has_begun:  # what others may want must not wait for the jobs before this one
            self.let_go()

    def let_go(self) -> None:
        """Close its leases: all of them, also if one raises."""
        with contextlib.ExitStack() as leases:
            for block in self.blocks:
                leases.callback(block.close)

    def check(self) -> float:
        """Whether the job may go on: the seconds left until its deadline.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job must not go on.
        """
        if self._cancelled.done():
            raise RestoreCancelledError
        now = time.monotonic()
        if (fence := self.fence) is not None:
            if fence.is_reached():
                self.fence = None
            else:
                self.fenced_until = now
        left = self.deadline_s - self.taken_s(now)
        if left <= 0:
            raise RestoreTimeoutError(
                f"{self.num_tokens} tokens are not restored after {now - self.submitted:.3f} s"
            )
        return left

    def ran_s(self, until: float) -> float:
        """Seconds from the first read until then, less what it waited for ``fence``."""
        return until - self.started - self.fenced_s

    def taken_s(self, now: float) -> float:
        """Seconds that its request has waited for it alone, and not for what the device did before."""
        return now - max(self.submitted, self.fenced_until)

    def await_fence(self) -> None:
        """Wait until its slots may be written to.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job must not go on. A pass may take seconds.
        """
        if self.fence is None:
            return
        began = time.monotonic()
        try:
            self.check()
            while self.fence is not None:
                time.sleep(_LOOK_AGAIN_S)
                self.check()
        finally:
            self.fenced_s += time.monotonic() - began

    def await_read(self, read: Future[None]) -> None:
        """Wait for ``read``, as long as the job may go on.

        Raises:
            RestoreCancelledError, RestoreTimeoutError: the job must not go on; the read does.
            HCacheError: it failed.
        """
        # A wait may end early: where Python lacks sem_clockwait, it is timed by a clock that may be set.
        while not read.done():
            wait((read, self._cancelled), self.check(), FIRST_COMPLETED)
        self.check()
        read.result()
