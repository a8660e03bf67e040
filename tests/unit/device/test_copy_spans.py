"""Rows that lie apart, copied by their addresses."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from sglang_hcache.device.streams import CudaStreams, copy_spans


def memmove(target: int, source: int, num_bytes: int, kind: int, stream: int) -> int:
    """What ``cudaMemcpyAsync`` does, at once."""
    assert (kind, stream) == (4, 7)
    ctypes.memmove(target, source, num_bytes)
    return 0


@pytest.mark.parametrize("spans", [[(2, 3)], [(5, 1), (0, 2), (9, 1)], [(0, 10)], []])
def test_rows_come_behind_each_other(spans: list[tuple[int, int]]) -> None:
    memory = torch.arange(12 * 6, dtype=torch.float16).view(12, 6)
    source = memory[1:11]  # begins somewhere in memory
    count = sum(count for _, count in spans)
    into = torch.full((count + 2, 6), -1.0, dtype=torch.float16)
    copy_spans(memmove, into[1 : 1 + count], source, spans, 7)
    expected = [source[first : first + count] for first, count in spans]
    assert torch.equal(into[1 : 1 + count], torch.cat([source[:0], *expected]))
    assert (into[[0, -1]] == -1).all()


def test_an_error_of_cuda_is_raised() -> None:
    rows = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="error 719"):
        copy_spans(lambda *_: 719, rows.clone(), rows, [(0, 1), (1, 1)], 0)


@pytest.mark.parametrize("error", [0, 719])
def test_the_device_of_the_stream_is_the_threads_meanwhile(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``set_stream`` makes it so. Else CUDA would set up the first GPU for a thread that restores on another one."""
    copies, others, seen = SimpleNamespace(cuda_stream=7), object(), []
    current: list[object] = [others]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    streams = CudaStreams.__new__(CudaStreams)
    streams.device, streams._copies = torch.device("cuda", 1), copies  # type: ignore[assignment]
    streams._memcpy = lambda *_: seen.append(current[-1]) or error
    rows = torch.zeros(3, 4)
    if error:
        with pytest.raises(RuntimeError):
            streams.copy(rows[:2].clone(), rows, [(0, 1), (2, 1)])
    else:
        streams.copy(rows[:2].clone(), rows, [(0, 1), (2, 1)])
    assert seen == [copies] * (1 if error else 2)
    assert current[-1] is others
