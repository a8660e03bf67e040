"""Rows that lie apart, copied by their addresses."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device import copies
from sglang_hcache.device.copies import Batches, OneByOne, PieceCopies, copies_of, copy_spans, runtime_copies
from sglang_hcache.device.streams import CudaStreams

STREAM = 7
NOT_SUPPORTED, LAUNCH_FAILURE = 801, 719


class Runtime:
    """CUDA's, which copies host memory at once.

    Args:
        batch_errors: of its calls of ``cudaMemcpyBatchAsync``, one after the other; then 0.
        error: of each ``cudaMemcpyAsync``.
    """

    def __init__(self, batch_errors: Sequence[int] = (), error: int = 0) -> None:
        self._batch_errors, self._error = list(batch_errors), error
        self.calls: list[str] = []
        self.last_error = 0
        # As ctypes' functions, they take ``argtypes`` and ``restype``.
        self.cudaMemcpyAsync = lambda *args: self._copy(*args)
        self.cudaMemcpyBatchAsync = lambda *args: self._copy_batch(*args)

    def cudaGetLastError(self) -> int:  # noqa: N802
        error, self.last_error = self.last_error, 0
        return error

    def _copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> int:
        assert (kind, stream) == (4, STREAM)
        self.calls.append("one")
        if self._error:
            self.last_error = self._error
        else:
            ctypes.memmove(target, source, num_bytes)
        return self._error

    def _copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int, number: int, stream: int
    ) -> int:  # fmt: skip
        """Last piece first: CUDA promises no order."""
        *others, flags = _read(attributes, count=6, of=ctypes.c_int)
        assert others == [1, 0, 0, 0, 0]
        assert _read(firsts, count=number) == [0]
        assert stream == STREAM
        self.calls.append("batch" if flags == 1 else "batch without a hint")
        if error := self._batch_errors.pop(0) if self._batch_errors else 0:
            self.last_error = error
            return error
        pieces = zip(
            _read(targets, count=count), _read(sources, count=count), _read(sizes, count=count), strict=True
        )
        for piece in reversed(list(pieces)):
            ctypes.memmove(*piece)
        return 0


def _read(address: int, *, count: int, of: Any = ctypes.c_size_t) -> list[int]:
    return list((of * count).from_address(address))


def one_by_one() -> PieceCopies:
    return copies_of(Runtime(), 12)


def batches() -> PieceCopies:
    return copies_of(Runtime(), 13)


def two_rows(ways: PieceCopies) -> None:
    """Copies two rows, and looks whether they came."""
    rows = torch.arange(12.0).view(3, 4)
    into = torch.zeros(2, 4)
    copy_spans(ways, into, [rows], [(2, 1), (0, 1)], STREAM)
    assert torch.equal(into, rows[[2, 0]])


@st.composite
def scattered(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of rows, and spans of them in any order."""
    num_rows = draw(st.integers(1, 40))
    first = st.integers(0, num_rows - 1)
    span = first.flatmap(lambda at: st.tuples(st.just(at), st.integers(1, num_rows - at)))
    return num_rows, draw(st.lists(span, min_size=1, max_size=12))


@pytest.mark.parametrize("way", [one_by_one, batches])
@given(
    scattered(), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5),
    st.sampled_from([torch.uint8, torch.float16, torch.float64]),
)  # fmt: skip
def test_rows_come_behind_each_other(
    way: Any,
    of: tuple[int, list[tuple[int, int]]],
    num_sources: int,
    width: int,
    begin: int,
    dtype: torch.dtype,
) -> None:
    num_rows, spans = of
    # They begin somewhere in memory.
    sources = [torch.randint(0, 250, (begin + num_rows, width)).to(dtype)[begin:] for _ in range(num_sources)]
    count = num_sources * sum(count for _, count in spans)
    into = torch.full((count + 2, width), 255).to(dtype)
    copy_spans(way(), into[1 : 1 + count], sources, spans, STREAM)
    expected = [source[first : first + n] for source in sources for first, n in spans]
    assert torch.equal(into[1 : 1 + count], torch.cat(expected))
    assert (into[[0, -1]] == 255).all()


def test_a_batch_is_one_call() -> None:
    runtime = Runtime()
    two_rows(copies_of(runtime, 13))
    assert runtime.calls == ["batch"]


def test_addresses_past_four_gigabytes_are_whole() -> None:
    seen: list[list[int]] = []
    source = torch.empty(
        10**7, 8192, dtype=torch.bfloat16, device="meta"
    )  # no memory at all: its address is 0
    into = torch.empty(2, 8192, dtype=torch.bfloat16)
    copy_spans(
        lambda *pieces: seen.extend(piece.tolist() for piece in pieces[:3]), into, [source], [(9_999_999, 1), (3, 1)], 0
    )  # fmt: skip
    begin = into.data_ptr()
    assert seen == [[begin, begin + 16384], [9_999_999 * 16384, 3 * 16384], [16384, 16384]]


@pytest.mark.parametrize("version", [11, 12])
def test_before_cuda_13_a_batch_has_other_arguments(version: int) -> None:
    runtime = Runtime()
    two_rows(copies_of(runtime, version))
    assert runtime.calls == ["one", "one"]


def test_a_runtime_without_batches_copies_one_by_one() -> None:
    runtime = Runtime()
    del runtime.cudaMemcpyBatchAsync
    two_rows(copies_of(runtime, 13))
    assert runtime.calls == ["one", "one"]


def test_batches_that_never_work_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime([NOT_SUPPORTED] * 2)
    ways = copies_of(runtime, 13)
    with caplog.at_level(logging.WARNING):
        two_rows(ways)
        two_rows(ways)
    assert runtime.calls == ["batch", "batch without a hint", *["one"] * 4]
    assert runtime.last_error == 0  # torch would raise it in the next kernel's name
    (record,) = caplog.records
    assert "cudaMemcpyBatchAsync does not work here (error 801)" in record.getMessage()


def test_a_hint_that_is_refused_is_not_given_again(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime([NOT_SUPPORTED])
    ways = copies_of(runtime, 13)
    two_rows(ways)
    two_rows(ways)
    assert runtime.calls == ["batch", *["batch without a hint"] * 2]
    assert runtime.last_error == 0
    assert not caplog.records


def test_batches_that_have_worked_are_not_given_up() -> None:
    runtime = Runtime([0, NOT_SUPPORTED])
    ways = copies_of(runtime, 13)
    two_rows(ways)
    with pytest.raises(RuntimeError, match="cudaMemcpyBatchAsync: error 801"):
        two_rows(ways)
    two_rows(ways)
    assert runtime.calls == ["batch"] * 3


def test_a_device_on_which_nothing_works_says_nothing_about_batches(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime([LAUNCH_FAILURE] * 2, error=LAUNCH_FAILURE)
    ways = copies_of(runtime, 13)
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync: error 719"):
        two_rows(ways)
    two_rows(ways)
    assert runtime.calls == ["batch", "batch without a hint", "one", "batch without a hint"]
    assert not caplog.records


def test_an_error_of_cuda_is_raised() -> None:
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync: error 719"):
        two_rows(copies_of(Runtime(error=LAUNCH_FAILURE), 12))


@pytest.mark.parametrize(("version", "kind"), [("12.8", OneByOne), ("13.0", Batches)])
def test_the_runtime_is_the_one_that_torch_has(
    version: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(name: str) -> Runtime:
        loaded.append(name)
        return Runtime()

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(copies.ctypes, "PyDLL", load)
    assert isinstance(runtime_copies(), kind)
    assert loaded == [f"libcudart.so.{version[:2]}"]


def test_a_runtime_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(ConfigError, match=r"libcudart\.so\.99, which torch should have loaded"):
        runtime_copies()


@pytest.mark.parametrize("error", [None, RuntimeError("cudaMemcpyAsync: error 719")])
def test_the_device_of_the_stream_is_the_threads(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else CUDA would set up the first GPU for a thread that restores on another one."""
    queue, seen = SimpleNamespace(cuda_stream=STREAM), []
    current = torch.device("cuda", 0)

    def set_device(device: torch.device) -> None:
        nonlocal current
        current = device

    def copy(*pieces: object) -> None:
        seen.append((current, pieces[-1]))
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    streams = CudaStreams.__new__(CudaStreams)
    streams.device, streams._copies = torch.device("cuda", 1), queue  # type: ignore[assignment]
    streams._copy_pieces = copy
    rows = torch.zeros(3, 4)
    if error:
        with pytest.raises(RuntimeError):
            streams.copy_rows(rows[:2].clone(), [rows], [(0, 1), (2, 1)])
    else:
        streams.copy_rows(rows[:2].clone(), [rows], [(0, 1), (2, 1)])
    assert seen == [(torch.device("cuda", 1), STREAM)]
