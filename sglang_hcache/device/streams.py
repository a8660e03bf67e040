"""What is asked of a GPU: a queue of copies and a queue of computations.

Each queue does its work in order, and nothing orders one with the other, or with what else the device does, but marks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from sglang_hcache.device.copies import Spans, copy_spans, runtime_copies

_STREAMS = 32  # that torch has of a device and a priority


class Mark(Protocol):
    """A point in what a device does."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Hold up the calling thread until it is reached."""


class Stamp(Protocol):
    """When a device came to a point in what it does."""

    def is_reached(self) -> bool: ...

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between two events that are reached, and were taken by one thread."""


@dataclass(frozen=True, slots=True)
class ClockStamp:
    """Of a CPU, which has done what it was asked for by the time that it says so."""

    at: float = field(default_factory=time.monotonic)

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: ClockStamp) -> float:
        return self.at - earlier.at


class Streams(Protocol):
    """One device's two queues, used on one thread; and the one in which the calling thread itself does its work."""

    device: torch.device

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of one piece of memory. ``source`` must not change, nor ``into`` be used, before it is done."""

    def copy_rows(self, into: torch.Tensor, sources: Sequence[torch.Tensor], spans: Spans) -> None:
        """The same for some rows of each source, all of one width and dtype.

        Args:
            spans: in the order in which they fill ``into``, source by source.
        """

    def compute(self, work: Callable[[], None]) -> None:
        """Queue what ``work`` does on the device."""

    def computing(self) -> AbstractContextManager[object]:
        """Many computations are queued inside, and little else: each may be queued sooner there."""

    def copied(self) -> Mark:
        """When all copies so far are done."""

    def computed(self) -> Mark:
        """When all computations so far are done."""

    def copy_after(self, mark: Mark) -> None:
        """Begin with no further copy before ``mark``."""

    def compute_after(self, mark: Mark) -> None:
        """Begin with no further computation before ``mark``."""

    def fence(self) -> Mark:
        """When all is done that the calling thread, and the model's forward passes, have queued elsewhere."""

    def inline(self, work: Callable[[], object]) -> None:
        """Queue what ``work`` does where the calling thread's own work is."""

    def hold_up(self, mark: Mark) -> None:
        """Let the calling thread's own work go on behind ``mark`` only."""

    def fork(self, work: Callable[[], object]) -> Mark:
        """Queue what ``work`` does beside the calling thread's own work, behind what that has queued so far.

        What it reads must not change, nor its memory be let go, before :meth:`hold_up` was called with what this
        returns. Where the calling thread's work is recorded, that has to be before the recording ends.
        """

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``source`` into host memory of its own. ``source`` is kept, and must not change meanwhile."""

    def is_recording(self) -> bool:
        """Whether the calling thread's own work is recorded, to be done again later, and not done now."""

    def stamp(self) -> Stamp:
        """When all is done that the calling thread has queued so far."""


class BufferRing:
    """Buffers on a device, used in turn.

    Args:
        num_bytes: of each.
    """

    def __init__(self, device: torch.device, count: int, num_bytes: int) -> None:
        with torch.inference_mode(False):  # else nobody outside of that mode could write to it
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._used_until: list[Mark | None] = [None] * count
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Mark | None]:
        """The next buffer as a tensor, and until when its last use goes on; None: it had none."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers[self._next][:num_bytes].view(dtype).view(shape)
        return buffer, self._used_until[self._next]

    def give_back(self, until: Mark) -> None:
        """What was taken is used until then."""
        self._used_until[self._next] = until
        self._next = (self._next + 1) % len(self._buffers)


def device_name(kind: str, index: int) -> str:
    """What a profile's numbers belong to: ``cpu``, or the name of a GPU."""
    return kind if kind == "cpu" else torch.cuda.get_device_name(index)


class CudaStreams:
    """CUDA's.

    Both queues have the lowest priority that there is: what runs on :func:`stream_that_goes_first` starts before what
    waits in them. What is forked goes first, too: the pass will wait for it. That matters where it is a kernel, which
    keeps the priority of the stream that it was recorded on; a copy of rows in one piece is recorded as none.

    Args:
        others: streams that forward passes run on, besides the calling thread's current one.
    """

    def __init__(self, device: torch.device, others: Sequence[torch.cuda.Stream] = ()) -> None:
        self.device = device
        self._others = tuple(others)
        self._copies = _another_stream(device, self._others, priority=0)
        self._computations = _another_stream(device, [*self._others, self._copies], priority=0)
        self._forked = stream_that_goes_first(device, self._others)
        self._copy_pieces = runtime_copies()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with self._on(self._copies):
            into.copy_(source, non_blocking=True)

    def copy_rows(self, into: torch.Tensor, sources: Sequence[torch.Tensor], spans: Spans) -> None:
        # The thread's is the stream's from then on: else CUDA would set up the first GPU, too.
        torch.cuda.set_device(self.device)
        copy_spans(self._copy_pieces, into, sources, spans, self._copies.cuda_stream)

    def compute(self, work: Callable[[], None]) -> None:
        with self._on(self._computations):
            work()

    def computing(self) -> AbstractContextManager[object]:
        return self._on(self._computations)

    def copied(self) -> Mark:
        return _Events(self.device, [_event_of(self._copies)])

    def computed(self) -> Mark:
        return _Events(self.device, [_event_of(self._computations)])

    def copy_after(self, mark: Mark) -> None:
        assert isinstance(mark, _Events)
        mark.hold_up(self._copies)

    def compute_after(self, mark: Mark) -> None:
        assert isinstance(mark, _Events)
        mark.hold_up(self._computations)

    def fence(self) -> Mark:
        streams = {torch.cuda.current_stream(self.device), *self._others}
        return _Events(self.device, [_event_of(stream) for stream in streams])

    def inline(self, work: Callable[[], object]) -> None:
        work()

    def hold_up(self, mark: Mark) -> None:
        assert isinstance(mark, _Events)
        mark.hold_up(torch.cuda.current_stream(self.device))

    def fork(self, work: Callable[[], object]) -> Mark:
        self._forked.wait_event(_event_of(torch.cuda.current_stream(self.device)))
        with self._on(self._forked):
            work()
        return _Events(self.device, [_event_of(self._forked)])

    def download(self, source: torch.Tensor) -> torch.Tensor:
        with self._on(self._copies):
            into = source.to("cpu", non_blocking=True)  # pinned memory, which torch keeps for the next one
        source.record_stream(self._copies)
        return into

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stamp(self) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Stamp(event)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As ``torch.cuda.stream``, which asks for devices and the environment: 20 microseconds a time, here 5.

        The thread's device is the stream's from then on: nothing of ours is for another one.
        """
        before = torch.cuda.current_stream(self.device)
        if before == stream:
            yield
            return
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)


def stream_that_goes_first(
    device: torch.device, others: Sequence[torch.cuda.Stream] = ()
) -> torch.cuda.Stream:
    """For forward passes: decoding keeps its time between tokens beside a restore. Not one of ``others``."""
    return _another_stream(device, others, priority=-1)


def _another_stream(
    device: torch.device, others: Sequence[torch.cuda.Stream], priority: int
) -> torch.cuda.Stream:
    """A stream; 0 is the lowest priority. torch hands out 32 of each, again and again: not one of ``others``."""
    taken = {torch.cuda.current_stream(device).cuda_stream, *(other.cuda_stream for other in others)}
    drawn = (torch.cuda.Stream(device, priority=priority) for _ in range(2 * _STREAMS))  # type: ignore[no-untyped-call]
    return next(stream for stream in drawn if stream.cuda_stream not in taken)


def _event_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """What is queued so far. Who waits for it sleeps: others need the core."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class _Stamp:
    """A :class:`Stamp`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: _Stamp) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class _Events:
    """A :class:`Mark` of one or several streams.

    A thread that has no device yet gets this one: else CUDA would set up the first GPU for it, too.
    """

    def __init__(self, device: torch.device, events: Sequence[torch.cuda.Event]) -> None:
        self._device = device
        self._events = tuple(events)

    def is_reached(self) -> bool:
        torch.cuda.set_device(self._device)
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.set_device(self._device)
        for event in self._events:
            event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        for event in self._events:
            stream.wait_event(event)
