"""A device that does what it is asked for as late, or in as odd an order, as its queues allow."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from sglang_hcache.device.copies import Spans

COPIES, COMPUTATIONS, MODEL, FORKED = "copies", "computations", "the model", "forked from the model"
QUEUES = (COPIES, COMPUTATIONS, FORKED, MODEL)

ORDERS: dict[str, Callable[[random.Random], tuple[str, ...]]] = {
    "copies first": lambda _draw: QUEUES,
    "computations first": lambda _draw: (COMPUTATIONS, COPIES, MODEL, FORKED),
    "the model first": lambda _draw: (MODEL, FORKED, COMPUTATIONS, COPIES),
    "any": lambda draw: tuple(draw.sample(QUEUES, len(QUEUES))),
}
"""Which queue goes on, of those that may."""


@dataclass
class _Queue:
    waiting: list[tuple[tuple[DelayedMark, ...], Callable[[], None]]] = field(default_factory=list)
    asked: int = 0
    done: int = 0


@dataclass(eq=False)
class DelayedMark:
    """The first ``count`` tasks of each queue. A recorded one has those of the last replay."""

    streams: DelayedStreams
    counts: tuple[tuple[str, int], ...]

    def is_there(self) -> bool:
        return all(self.streams.queues[name].done >= count for name, count in self.counts)

    def is_reached(self) -> bool:
        return self.streams.go_on(self, steps=self.streams.draw.randrange(3))

    def wait(self) -> None:
        assert self.streams.go_on(self), "it waits for itself"


class UnjoinedError(Exception):
    """CUDA ends no recording while it has work that was forked and is waited for by nobody."""


class DelayedStamp:
    """Work here takes no time."""

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, _earlier: DelayedStamp) -> float:
        return 0.0


class DelayedStreams:
    """A :class:`~sglang_hcache.device.streams.Streams` that does nothing before somebody asks for a result.

    Args:
        order: a key of ``ORDERS``.
        eager: steps that are made unasked, after each task that is queued.
    """

    device = torch.device("cpu")

    def __init__(self, order: str = "any", seed: int = 0, eager: int = 0) -> None:
        self.queues = {name: _Queue() for name in QUEUES}
        self.draw = random.Random(seed)
        self._order, self._eager = ORDERS[order], eager
        self._lock = threading.RLock()
        self._recorded: list[Callable[[], None]] | None = None
        self._unjoined: set[DelayedMark] = set()

    # -- Streams ---------------------------------------------------------------------------------

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.put(COPIES, lambda: into.copy_(source))

    def copy_rows(self, into: torch.Tensor, sources: Sequence[torch.Tensor], spans: Spans) -> None:
        def work() -> None:
            into.copy_(torch.cat([source[at : at + count] for source in sources for at, count in spans]))

        self.put(COPIES, work)

    def compute(self, work: Callable[[], None]) -> None:
        self.put(COMPUTATIONS, work)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copied(self) -> DelayedMark:
        return self._mark(COPIES)

    def computed(self) -> DelayedMark:
        return self._mark(COMPUTATIONS)

    def copy_after(self, mark: DelayedMark) -> None:
        self.put(COPIES, _nothing, mark)

    def compute_after(self, mark: DelayedMark) -> None:
        self.put(COMPUTATIONS, _nothing, mark)

    def fence(self) -> DelayedMark:
        return self._mark(MODEL)

    def inline(self, work: Callable[[], object]) -> None:
        self._ask(lambda: self.put(MODEL, work))

    def hold_up(self, mark: DelayedMark) -> None:
        self._unjoined.discard(mark)
        self._ask(lambda: self.put(MODEL, _nothing, replace(mark)))

    def fork(self, work: Callable[[], object]) -> DelayedMark:
        mark = DelayedMark(self, ())
        self._unjoined.add(mark)

        def ask() -> None:
            self.put(FORKED, work, self._mark(MODEL))
            mark.counts = self._mark(FORKED).counts

        self._ask(ask)
        return mark

    def download(self, source: torch.Tensor) -> torch.Tensor:
        into = torch.full_like(source, -1)
        self.copy(into, source)
        return into

    def is_recording(self) -> bool:
        return self._recorded is not None

    def stamp(self) -> DelayedStamp:
        return DelayedStamp()

    # -- what happens ----------------------------------------------------------------------------

    def put(self, name: str, task: Callable[[], object], *after: DelayedMark) -> None:
        """Queue a task; tests do so for the model's."""

        def run() -> None:
            with torch.inference_mode():
                task()

        with self._lock:
            queue = self.queues[name]
            queue.waiting.append((after, run))
            queue.asked += 1
            for _ in range(self._eager):
                self._step()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """What ``work`` asks for inline, or forked from it, is done whenever the result is called: a CUDA graph.

        Raises:
            UnjoinedError: what it forked is not waited for.
        """
        self._recorded = recorded = []
        self._unjoined.clear()
        try:
            work()
        finally:
            self._recorded = None
        if self._unjoined:
            raise UnjoinedError

        def replay() -> None:
            for ask in recorded:
                ask()

        return replay

    def go_on(self, mark: DelayedMark, steps: int | None = None) -> bool:
        """Do tasks until ``mark`` is reached, or so many; whether it is."""
        with self._lock:
            made = 0
            while not mark.is_there() and made != steps and self._step():
                made += 1
            return mark.is_there()

    @property
    def num_waiting(self) -> int:
        """Tasks of a restore that are not done."""
        return sum(len(self.queues[name].waiting) for name in (COPIES, COMPUTATIONS))

    def _ask(self, ask: Callable[[], None]) -> None:
        """Now, or whenever what is recorded is done."""
        if self._recorded is None:
            ask()
        else:
            self._recorded.append(ask)

    def _step(self) -> bool:
        for name in self._order(self.draw):
            queue = self.queues[name]
            if queue.waiting and all(mark.is_there() for mark in queue.waiting[0][0]):
                _, task = queue.waiting.pop(0)
                task()
                queue.done += 1
                return True
        return False

    def _mark(self, *names: str) -> DelayedMark:
        return DelayedMark(self, tuple((name, self.queues[name].asked) for name in names))


def _nothing() -> None:
    pass
