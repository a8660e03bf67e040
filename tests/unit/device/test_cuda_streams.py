"""What CUDA is asked for, and in which order: by a stand-in for ``torch.cuda`` that knows what comes behind what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_hcache.device import streams
from sglang_hcache.device.streams import CudaStreams, stream_that_goes_first

CPU = torch.device("cpu")
_HANDED_OUT = 5
"""Streams of a priority, again and again; torch has 32."""


class Cuda:
    """Work is a name. Each stream knows what is done before whatever it gets next."""

    def __init__(self) -> None:
        self.handles = itertools.cycle(range(1, _HANDED_OUT + 1))
        self.first_of: dict[int, Stream] = {}
        self.current = Stream(self)
        self.waited: list[Event] = []
        """By the CPU."""
        self.have_device: set[int] = set()
        """Threads."""

    def set_device(self, device: torch.device) -> None:
        self.have_device.add(threading.get_ident())

    def is_asked(self) -> None:
        assert threading.get_ident() in self.have_device, "CUDA would set up the first GPU for this thread"

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def work(self, name: str, stream: int | None = None) -> None:
        """Asked for on the stream with a handle. Default: the current one."""
        (self.current if stream is None else self.first_of[stream]).before.add(name)


class Stream:
    def __init__(self, cuda: Cuda, device: object = None, priority: int = 0) -> None:
        self.cuda_stream, self.priority = next(cuda.handles), priority
        same = cuda.first_of.setdefault(self.cuda_stream, self)
        self.before: set[str] = set() if same is self else same.before

    def wait_event(self, event: Event) -> None:
        self.before |= event.reached


class Event:
    def __init__(self, cuda: Cuda, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self._cuda = cuda
        self.reached: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.reached = set(stream.before)

    def query(self) -> bool:
        self._cuda.is_asked()
        return self in self._cuda.waited

    def synchronize(self) -> None:
        self._cuda.is_asked()
        self._cuda.waited.append(self)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    stand_in: dict[str, Callable[..., Any]] = {
        "Stream": lambda *args, **kwargs: Stream(cuda, *args, **kwargs),
        "Event": lambda **kwargs: Event(cuda, **kwargs),
        "current_stream": lambda _device: cuda.current,
        "set_stream": cuda.set_stream,
        "set_device": cuda.set_device,
    }
    for name, function in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, function)
    copy = torch.Tensor.copy_

    def copy_(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        cuda.work("a copy")
        return copy(into, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(
        streams, "runtime_copies", lambda: lambda *pieces: cuda.work("copies of spans", pieces[-1])
    )
    return cuda


def test_copies_and_computations_are_queues_of_their_own(cuda: Cuda) -> None:
    forward, before = Stream(cuda), cuda.current
    asked = CudaStreams(CPU, [forward])  # type: ignore[list-item]
    rows = torch.zeros(4, 2)
    asked.copy(torch.empty(4, 2), rows)
    asked.copy_rows(torch.empty(2, 2), [rows], ((0, 1), (3, 1)))
    asked.compute(lambda: cuda.work("a product"))
    assert cuda.current is before
    assert asked.copied()._events[0].reached == {"a copy", "copies of spans"}  # type: ignore[attr-defined]
    assert asked.computed()._events[0].reached == {"a product"}  # type: ignore[attr-defined]
    assert not forward.before | before.before
    with pytest.raises(ZeroDivisionError):
        asked.compute(lambda: 1 // 0)
    assert cuda.current is before


def test_where_much_is_computed_the_queue_is_not_changed_each_time(cuda: Cuda) -> None:
    before, asked = cuda.current, CudaStreams(CPU)
    with asked.computing():
        computing = cuda.current
        assert computing is not before
        for _ in "ab":
            asked.copy_rows(torch.empty(1, 2), [torch.zeros(4, 2)], ((0, 1),))
            asked.compute(lambda: cuda.work("a product"))
            assert cuda.current is computing
    assert cuda.current is before
    assert asked.copied()._events[0].reached == {"copies of spans"}  # type: ignore[attr-defined]
    assert asked.computed()._events[0].reached == {"a product"}  # type: ignore[attr-defined]


def test_a_queue_goes_on_behind_a_mark(cuda: Cuda) -> None:
    asked = CudaStreams(CPU)
    asked.copy(torch.empty(1), torch.zeros(1))
    asked.compute_after(asked.copied())
    asked.compute(lambda: cuda.work("a product"))
    assert asked.computed()._events[0].reached == {"a copy", "a product"}  # type: ignore[attr-defined]
    assert asked.copied()._events[0].reached == {"a copy"}  # type: ignore[attr-defined]
    asked.copy_after(asked.computed())
    assert asked.copied()._events[0].reached == {"a copy", "a product"}  # type: ignore[attr-defined]
    assert not cuda.current.before
    asked.hold_up(asked.computed())
    assert cuda.current.before == {"a copy", "a product"}


def test_a_fence_is_behind_the_calling_thread_and_the_model(cuda: Cuda) -> None:
    forward = Stream(cuda)
    asked = CudaStreams(CPU, [forward])  # type: ignore[list-item]
    asked.inline(lambda: cuda.work("slots"))
    forward.before.add("a pass")
    fence = asked.fence()
    cuda.work("later")
    asked.compute(lambda: cuda.work("a product"))
    asked.copy_after(fence)
    assert asked.copied()._events[0].reached == {"slots", "a pass"}  # type: ignore[attr-defined]
    assert not fence.is_reached()
    fence.wait()
    assert fence.is_reached()
    assert set().union(*(event.reached for event in cuda.waited)) == {"slots", "a pass"}


def test_what_is_forked_is_behind_the_calling_thread_alone_and_joined_by_it(cuda: Cuda) -> None:
    asked, before = CudaStreams(CPU), cuda.current
    asked.compute(lambda: cuda.work("a product"))
    cuda.work("a norm")
    mark = asked.fork(lambda: cuda.work("a fork"))
    assert cuda.current is before
    cuda.work("attention")
    assert before.before == {"a norm", "attention"}
    assert asked._forked.before == {"a norm", "a fork"}
    asked.hold_up(mark)
    assert before.before == {"a norm", "attention", "a fork"}


def test_a_download_is_a_copy_whose_source_is_kept(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[torch.Tensor, Stream]] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda source, stream: kept.append((source, stream)))

    def to(source: torch.Tensor, device: str, *, non_blocking: bool) -> torch.Tensor:
        cuda.work(f"to {device}")
        assert non_blocking
        return source.clone()

    monkeypatch.setattr(torch.Tensor, "to", to)
    asked, source = CudaStreams(CPU), torch.arange(3)
    assert asked.download(source).tolist() == [0, 1, 2]
    ((rows, stream),) = kept
    assert rows is source
    assert asked.copied()._events[0].reached == stream.before == {"to cpu"}  # type: ignore[attr-defined]


def test_its_streams_are_nobody_elses(cuda: Cuda) -> None:
    """torch hands them out again and again: copies behind SGLang's passes would be no copies beside them."""
    for _ in range(2 * _HANDED_OUT):
        forward = Stream(cuda)
        if forward.cuda_stream == cuda.current.cuda_stream:
            continue
        asked = CudaStreams(CPU, [forward])  # type: ignore[list-item]
        mine = {asked._copies.cuda_stream, asked._computations.cuda_stream}
        assert len(mine | {forward.cuda_stream, cuda.current.cuda_stream}) == 4
        assert asked._forked.cuda_stream not in {forward.cuda_stream, cuda.current.cuda_stream}


def test_what_goes_first_goes_on_streams_of_their_own(cuda: Cuda) -> None:
    """Of forward passes, and of what prepares the next one meanwhile."""
    for _ in range(2 * _HANDED_OUT):
        forward = stream_that_goes_first(CPU)
        beside = stream_that_goes_first(CPU, [forward])
        assert len({forward.cuda_stream, beside.cuda_stream, cuda.current.cuda_stream}) == 3
        assert forward.priority == beside.priority == -1
    asked = CudaStreams(CPU, [forward])
    assert asked._copies.priority == asked._computations.priority == 0
    assert asked._forked.priority == -1, "passes wait for it"
