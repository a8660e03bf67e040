"""Ranks that are processes, over torch's process group."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.device.fingerprint import parts_fingerprint
from sglang_hcache.sglang_plugin.seam.ranks import Alone, RanksDifferError, Together

SIZE = 2


def serve(rank: int, meeting_place: Path, answers: Any) -> None:
    """What a rank is told, in order."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=SIZE)
    ranks = Together(distributed.new_group(list(range(SIZE)), backend="gloo"))
    told: list[Any] = [(ranks.rank, ranks.size)]
    told.append(ranks.minimum(3 - rank, rank, True, rank == 0))
    told.append(ranks.minimum())
    told.append(ranks.from_first({"of": rank}))
    told.append(ranks.all_of(bytes([rank])))
    time.sleep(0.05 * (1 - rank))
    before = time.monotonic()
    ranks.sync(one=1, other=2.5)
    told.append(ranks.now())
    told.append(ranks.now() == told[-1] and (rank == 1 or ranks.now() >= before))
    try:
        ranks.sync(seven=7, rank=rank)
        told.append(None)
    except RanksDifferError as error:
        told.append(str(error))
    answers.put((rank, told))
    distributed.barrier()


def test_processes_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=serve, args=(rank, tmp_path / "place", answers)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        told = dict(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    for rank in range(SIZE):
        place, least, nothing, first, everybody, _now, keeps_time, differs = told[rank]
        assert place == (rank, SIZE)
        assert least == (2, 0, True, False)
        assert nothing == ()
        assert first == {"of": 0}
        assert everybody == [b"\0", b"\1"]
        assert keeps_time
        assert differs == (
            None
            if rank == 0
            else "rank 1 of 2 has {'seven': 7, 'rank': 1}, rank 0 {'seven': 7.0, 'rank': 0.0}"
        )
    assert told[0][5] == told[1][5], "the clock"


def test_one_alone_finds_what_it_finds() -> None:
    alone, before = Alone(), time.monotonic()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.minimum(3, False) == (3, False)
    assert alone.from_first("a") == "a"
    assert alone.all_of("a") == ["a"]
    alone.sync(number=1)
    assert before <= alone.now() <= time.monotonic()


@pytest.mark.parametrize(("parts", "other"), [([b"a", b"b"], [b"b", b"a"]), ([b"a", b"b"], [b"a", b"c"])])
def test_weights_of_several_parts(parts: list[bytes], other: list[bytes]) -> None:
    assert parts_fingerprint(parts) == parts_fingerprint(list(parts))
    assert parts_fingerprint(parts) != parts_fingerprint(other)
    assert parts_fingerprint(parts[:1]) == parts[0], "as it always was"
