"""Threads that restore parts of layers, and pipelines that use them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_hcache.restore.lanes import Lanes


@pytest.fixture(scope="module")
def lanes() -> Lanes:
    return Lanes(3)


def test_parts_cover_all_rows_once(lanes: Lanes) -> None:
    for count in (1, 511, 512, 1024, 1600, 5000):
        seen = torch.zeros(count, dtype=torch.int64)
        lock = threading.Lock()

        def work(first: int, end: int, seen: torch.Tensor = seen, lock: threading.Lock = lock) -> None:
            assert torch.is_inference_mode_enabled()
            with lock:
                seen[first:end] += 1

        parts = lanes.start(work, count)
        for part in parts:
            part.result()
        assert len(parts) == max(1, min(3, count // 512))
        assert (seen == 1).all()


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_lanes_have_one_thread_each_and_leave_the_others_alone() -> None:
    before, own_niceness = torch.get_num_threads(), niceness()
    torch.set_num_threads(4)
    try:
        found: list[tuple[int, int]] = []
        lanes = Lanes(2)
        for part in lanes.start(lambda *_: found.append((torch.get_num_threads(), niceness())), 2000):
            part.result()
        assert found == 2 * [(1, max(10, own_niceness))]
        assert niceness() == own_niceness
        assert torch.get_num_threads() == 4
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 4
    finally:
        torch.set_num_threads(before)


def test_there_are_no_more_than_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 128)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert len(Lanes().start(lambda *_: None, 100_000)) == 16


def test_an_error_comes_out_of_its_part(lanes: Lanes) -> None:
    def work(first: int, _end: int) -> None:
        if first:
            raise RuntimeError("the second half")

    first, second = lanes.start(work, 1024)
    first.result()
    with pytest.raises(RuntimeError, match="the second half"):
        second.result()
