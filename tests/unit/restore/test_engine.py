"""The engine's jobs, with lanes, without them, and on a GPU."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from sglang_hcache.core.errors import (
    RestoreCancelledError,
    RestoreTimeoutError,
    StoreIOError,
    StoreTimeoutError,
)
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.pipeline import NUM_BUFFERS, layers_of_steps
from tests.unit.restore.bench import BLOCK_CHUNKS, LAYERS, PATIENCE_S, SLOTS, Bench, DoubleAndPosition
from tests.unit.restore.delayed_streams import DelayedStreams


@pytest.fixture(params=["alone", "lanes", "device"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(
        lanes=2 if request.param == "lanes" else None,
        streams=DelayedStreams() if request.param == "device" else None,
    )


def test_every_layer_lands_in_its_slots(bench: Bench) -> None:
    for first in (0, 1, 2, 1):
        job = bench.run(first=first)
        assert job.state is RestoreState.DONE
        start = first * CHUNK_TOKENS
        for layer in range(LAYERS):
            assert torch.equal(bench.pool.k[layer][job.slots, 0], bench.stored[layer, start:] * 2)
            positions = torch.arange(start, start + job.num_tokens).float()
            assert torch.equal(bench.pool.v[layer][job.slots, 0, 0], positions)
    bench.assert_nothing_is_pinned()


@pytest.mark.parametrize("device", [{}, {"lanes": 2}, {"streams": DelayedStreams()}])
@pytest.mark.parametrize("place", [{"in_place": True}, {"scattered": True}])
def test_what_lies_in_host_memory_is_not_read(place: dict[str, Any], device: dict[str, Any]) -> None:
    bench, seen = Bench(**place, **device), []
    bench.tiers.before_read = seen.append  # type: ignore[method-assign]
    job = bench.run(first=0)
    assert job.state is RestoreState.DONE
    assert not seen
    for layer in range(LAYERS):
        assert torch.equal(bench.pool.k[layer][job.slots, 0], bench.stored[layer] * 2)
        assert torch.equal(bench.pool.v[layer][job.slots, 0, 0], torch.arange(job.num_tokens).float())
    cancelled = bench.run(cancel=True)
    assert cancelled.state is RestoreState.CANCELLED
    bench.assert_nothing_is_pinned()


@pytest.mark.parametrize("device", [{}, {"lanes": 2}, {"streams": DelayedStreams()}])
def test_small_layers_are_read_together_but_the_first(device: dict[str, Any]) -> None:
    bench, reads = Bench(**device, buffer_chunks=2 * BLOCK_CHUNKS), []
    bench.tiers.before_reads = reads.append  # type: ignore[method-assign]
    job = bench.run(first=1)
    assert job.state is RestoreState.DONE
    assert sorted(reads) == [[0], [1], [2, 3], [4, 5], [6, 7]]
    for layer in range(LAYERS):
        assert torch.equal(bench.pool.k[layer][job.slots, 0], bench.stored[layer, CHUNK_TOKENS:] * 2)
    bench.assert_nothing_is_pinned()


def test_layers_of_steps() -> None:
    layers = range(24)
    large, small = dict.fromkeys(layers, 9), dict.fromkeys(layers, 4)
    assert layers_of_steps(large, 8) == [(layer,) for layer in layers]
    assert layers_of_steps(small, 8) == [(layer, layer + 1) for layer in range(0, 24, 2)]
    for most in (16, 100, math.inf):  # no fewer than six: reading goes on under restoring
        assert layers_of_steps(small, most) == [tuple(range(i, i + 4)) for i in range(0, 24, 4)]
    mixed = layers_of_steps({0: 4, 5: 4, 6: 8, 7: 8, 9: 8, 1: 4, 2: 4}, 12)
    assert mixed == [(0, 5), (6,), (7,), (9, 1), (2,)]
    assert layers_of_steps({}, 8) == layers_of_steps({}, 8, begins=True) == []
    assert layers_of_steps(small, 16, begins=True)[:3] == [(0,), (1, 2, 3), (4, 5, 6, 7)]
    assert layers_of_steps(large, 8, begins=True) == layers_of_steps(large, 8)
    assert layers_of_steps(dict.fromkeys(range(6), 2), 8, 3) == [(0, 1, 2), (3, 4, 5)]


def test_only_the_layers_asked_for_in_their_order(bench: Bench) -> None:
    seen: list[int] = []
    bench.tiers.before_read = seen.append  # type: ignore[method-assign]
    job = bench.run(layers=(4, 2))
    assert job.state is RestoreState.DONE
    assert sorted(seen) == [2, 4]
    for layer in range(LAYERS):
        expected = bench.stored[layer, CHUNK_TOKENS:] * 2 if layer in (2, 4) else torch.zeros(1)
        assert (bench.pool.k[layer][job.slots, 0] == expected).all()


def test_the_next_layer_is_read_while_one_is_projected(bench: Bench) -> None:
    seen: list[int] = []
    bench.tiers.before_read = seen.append  # type: ignore[method-assign]
    blocked = threading.Event()
    project = DoubleAndPosition.project

    def slow(self: DoubleAndPosition, layer: int, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == 0:
            blocked.set()
            deadline = time.monotonic() + PATIENCE_S
            while 1 not in seen:
                assert time.monotonic() < deadline, "layer 1 was not read during the projection of layer 0"
        return project(self, layer, *args)

    bench.restorer.projector = type("Slow", (DoubleAndPosition,), {"project": slow})()
    assert bench.run().state is RestoreState.DONE
    assert blocked.is_set()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failing_read_fails_the_job_and_only_that(bench: Bench, layer: int) -> None:
    def fail(at: int) -> None:
        if at == layer:
            raise StoreIOError("broken")

    bench.tiers.before_read = fail  # type: ignore[method-assign]
    job = bench.run()
    assert job.state is RestoreState.FAILED
    assert isinstance(job.error, StoreIOError)
    bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
    assert bench.run().state is RestoreState.DONE
    bench.assert_nothing_is_pinned()


def test_an_error_nobody_foresaw_does_not_end_the_thread(bench: Bench) -> None:
    def fail(_layer: int) -> None:
        raise ZeroDivisionError

    bench.tiers.before_read = fail  # type: ignore[method-assign]
    assert bench.run().state is RestoreState.FAILED
    bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
    assert bench.run().state is RestoreState.DONE


def test_the_log_tells_once_of_an_error_that_every_job_has(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the process ends: no pool of threads takes work then, and there may be hundreds of jobs."""

    def fail(error: type[Exception]) -> None:
        def raise_it(_layer: int) -> None:
            raise error

        bench.tiers.before_read = raise_it  # type: ignore[method-assign]
        for _ in range(3):
            assert bench.run().state is RestoreState.FAILED

    fail(StoreIOError)
    fail(ZeroDivisionError)  # is told of although it comes at once after another one
    told = [record.exc_info and record.exc_info[0] for record in caplog.records]
    assert told == [None, ZeroDivisionError]
    assert bench.counters["restore.errors"] == 3


def test_no_memory_for_new_buffers_fails_restores_instead_of_leaving_them_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_layer: int) -> None:
        raise StoreTimeoutError("the device hangs")

    def refuse(_size: int) -> None:
        raise MemoryError

    bench.tiers.before_read = hang  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        patch.setattr(bench.pipeline, "_memory", refuse)
        assert [bench.run().state for _ in range(3)] == [RestoreState.FAILED] * 3
        bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
        assert bench.run().state is RestoreState.FAILED, "nothing was read"
    job = bench.run(first=0)
    assert job.state is RestoreState.DONE
    assert torch.equal(bench.pool.k[LAYERS - 1][job.slots, 0], bench.stored[LAYERS - 1] * 2)


@pytest.mark.parametrize("error", [StoreTimeoutError("late"), ZeroDivisionError()])
def test_a_buffer_that_may_still_be_written_is_not_used_again(bench: Bench, error: Exception) -> None:
    def fail(_layer: int) -> None:
        raise error

    given = bench.pipeline._spare[-1]  # to the first read
    bench.tiers.before_read = fail  # type: ignore[method-assign]
    bench.run()
    bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
    assert bench.run().state is RestoreState.DONE
    assert all(buffer is not given for buffer in bench.pipeline._spare)


def reads_left_behind(bench: Bench) -> list[Future[None]]:
    """Of a job whose time was over before its reads were. On a busy machine some jobs are late before they read."""
    while not bench.pipeline._left:
        assert bench.run(deadline_s=0.1).state is RestoreState.FAILED
    futures = [read.future for read in bench.pipeline._left]
    assert None not in futures
    return futures  # type: ignore[return-value]


def test_a_buffer_whose_read_ended_late_is_used_again(bench: Bench) -> None:
    """Pinned memory is never freed: a slow disk must not take more of it with every job."""
    made = []
    pipeline = bench.pipeline
    memory = pipeline._memory
    pipeline._memory = lambda size: made.append(size) or memory(size)  # type: ignore[func-returns-value]
    for _ in range(3):
        release = threading.Event()
        bench.tiers.before_read = lambda _layer, release=release: release.wait(2 * PATIENCE_S)  # type: ignore[method-assign]
        reads = reads_left_behind(bench)
        release.set()
        for future in reads:
            future.result(PATIENCE_S)
    bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
    job = bench.run(first=0)
    assert job.state is RestoreState.DONE
    assert torch.equal(bench.pool.k[LAYERS - 1][job.slots, 0], bench.stored[LAYERS - 1] * 2)
    assert not made


def test_there_are_never_more_buffers_than_are_read_into(bench: Bench) -> None:
    """Reads of one job go on while the next one runs, with buffers that are made in place of theirs."""
    pipeline, release = bench.pipeline, threading.Event()
    bench.tiers.before_read = lambda _layer: release.wait(2 * PATIENCE_S)  # type: ignore[method-assign]
    reads = reads_left_behind(bench)
    assert bench.run(deadline_s=0.1).state is RestoreState.FAILED, "no reader is left for it"
    release.set()
    for future in reads:
        future.result(PATIENCE_S)
    bench.tiers.before_read = lambda _layer: None  # type: ignore[method-assign]
    assert bench.run().state is RestoreState.DONE
    assert len(pipeline._spare) == NUM_BUFFERS


def test_a_disk_that_hangs_does_not_hold_up_restores_from_host_memory(bench: Bench) -> None:
    release = threading.Event()
    bench.tiers.before_read = lambda _layer: release.wait(3 * PATIENCE_S)  # type: ignore[method-assign]
    reads_left_behind(bench)
    bench.tiers.reads = False
    job = bench.run()
    release.set()
    assert job.state is RestoreState.DONE


def test_leases_that_cannot_be_closed_do_not_hold_the_job_nor_each_other(bench: Bench) -> None:
    leases = tuple(bench.tiers.lease(bench.keys[index : index + 1]) for index in range(2))
    for lease in leases:
        lease._holds.callback(lambda: 1 / 0)
    job = RestoreJob(leases, 0, torch.arange(2 * CHUNK_TOKENS), PATIENCE_S, (0,))
    bench.engine.submit(job)
    assert bench.over.wait(PATIENCE_S)
    assert job.state is RestoreState.DONE
    bench.over.clear()
    assert bench.run().state is RestoreState.DONE
    bench.assert_nothing_is_pinned()


def test_a_job_that_does_not_end_as_it_should_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = RestoreJob.let_go
    monkeypatch.setattr(RestoreJob, "let_go", lambda job: let_go(job) or 1 / 0)
    assert bench.run().state is RestoreState.DONE
    assert bench.counters["restore.errors"] == 1
    bench.assert_nothing_is_pinned()


def test_a_job_is_over_when_it_is_cancelled_and_not_when_its_read_ends(bench: Bench) -> None:
    """A running request may wait for its slots."""
    began, release = threading.Event(), threading.Event()
    bench.tiers.before_read = lambda _layer: began.set() or release.wait(2 * PATIENCE_S)  # type: ignore[method-assign]
    job = RestoreJob((bench.tiers.lease(bench.keys[1:]),), 0, torch.arange(3 * CHUNK_TOKENS), 60.0, (0, 1))
    bench.engine.submit(job)
    assert began.wait(PATIENCE_S)
    job.cancel()
    assert bench.over.wait(PATIENCE_S)
    bench.over.clear()
    assert job.state is RestoreState.CANCELLED
    reads = list(bench.pipeline._left)
    assert reads
    release.set()
    for read in reads:
        assert read.future is not None
        read.future.exception(PATIENCE_S)
        assert read.frees_buffer(), "that its lease was closed meanwhile is no fault"
    assert bench.run().state is RestoreState.DONE


def test_a_job_that_is_cancelled_before_it_begins_waits_for_no_other(bench: Bench) -> None:
    reads, release = threading.Event(), threading.Event()

    def hold(_layer: int) -> None:
        reads.set()
        release.wait(2 * PATIENCE_S)

    bench.tiers.before_read = hold  # type: ignore[method-assign]
    jobs = [
        RestoreJob((bench.tiers.lease(bench.keys[1:]),), 0, slots, PATIENCE_S, tuple(range(LAYERS)))
        for slots in torch.randperm(SLOTS)[: 4 * CHUNK_TOKENS].split(2 * CHUNK_TOKENS)
    ]
    for job in jobs:
        bench.engine.submit(job)
    assert reads.wait(PATIENCE_S)
    closed = threading.Event()
    jobs[1].blocks[0]._holds.callback(closed.set)
    jobs[1].cancel()
    jobs[1].cancel()
    assert closed.is_set(), "nobody need wait for what it would have read"
    assert [job.state for job in jobs] == [RestoreState.RUNNING, RestoreState.CANCELLED]
    release.set()
    deadline = time.monotonic() + PATIENCE_S
    while not all(job.is_over for job in jobs):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [job.state for job in jobs] == [RestoreState.DONE, RestoreState.CANCELLED]
    assert not bench.pool.v[:, jobs[1].slots].any()
    assert not bench.pool.k[:, jobs[1].slots].any()
    bench.assert_nothing_is_pinned()


def test_a_cancelled_job_writes_nothing_more(bench: Bench) -> None:
    job = bench.run(cancel=True)
    assert job.state is RestoreState.CANCELLED
    assert not bench.pool.k.any()
    bench.assert_nothing_is_pinned()


def test_a_hung_read_ends_with_the_deadline(bench: Bench) -> None:
    release = threading.Event()
    bench.tiers.before_read = lambda _layer: release.wait(2 * PATIENCE_S)  # type: ignore[method-assign]
    job = bench.run(deadline_s=0.2)
    assert job.state is RestoreState.FAILED
    assert isinstance(job.error, RestoreTimeoutError)
    release.set()


class _Pass:
    """A forward pass of so many seconds, which the device is at."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def is_reached(self) -> bool:
        return time.monotonic() >= self._until

    def wait(self) -> None:
        time.sleep(max(0.0, self._until - time.monotonic()))


class _PassOfLooks(_Pass):
    """One that is over when it has been asked for so often, however long that takes."""

    def __init__(self, looks: int) -> None:
        super().__init__(0.0)
        self._looks = looks

    def is_reached(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def test_a_pass_before_it_is_no_time_of_the_restore(bench: Bench) -> None:
    """Recomputing would wait for it as well: it counts neither against the deadline, nor as slow."""
    job = bench.run(fence=_PassOfLooks(20), submitted_s_ago=2 * PATIENCE_S)
    assert job.state is RestoreState.DONE, job.error
    assert job.fenced_s > 0
    assert job.seconds == pytest.approx(job.ended - job.started - job.fenced_s)


def test_what_waits_for_a_pass_can_be_cancelled() -> None:
    """SGLang wants its slots: that pass may take seconds, and nothing is written before it is over."""
    job = RestoreJob((), 0, torch.arange(0), 60.0, (), fence=_Pass(PATIENCE_S))
    began = time.monotonic()
    threading.Timer(0.05, job.cancel).start()
    with pytest.raises(RestoreCancelledError):
        job.await_fence()
    assert time.monotonic() - began < PATIENCE_S / 2


def test_what_waits_behind_a_pass_in_the_queue_keeps_its_time() -> None:
    job = RestoreJob((), 0, torch.arange(0), 1.0, (), fence=_Pass(60.0))
    job.submitted -= 20.0
    assert job.check() > 0.5
    job.fence = _Pass(0.0)
    assert job.check() > 0.5, "it counts from where the pass was last seen to run"
    job.fenced_until -= 2.0
    with pytest.raises(RestoreTimeoutError):
        job.check()


def test_a_wait_that_ends_early_is_no_end_of_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose clock is set, where Python times waits by that one."""
    running = RestoreJob((), 0, torch.arange(0), 60.0, ())
    waits = iter([lambda: None, running.cancel])
    monkeypatch.setattr("sglang_hcache.restore.job.wait", lambda *_: next(waits)())
    read: Future[None] = Future()
    monkeypatch.setattr(read, "result", lambda: pytest.fail("who waits here knows no deadline"))
    with pytest.raises(RestoreCancelledError):
        running.await_read(read)


def test_closing_ends_the_job_that_runs_and_those_behind_it(bench: Bench) -> None:
    begun, release = threading.Event(), threading.Event()

    def hang(_layer: int) -> None:
        begun.set()
        release.wait(2 * PATIENCE_S)

    bench.tiers.before_read = hang  # type: ignore[method-assign]
    leases = [bench.tiers.lease(bench.keys[:BLOCK_CHUNKS]) for _ in range(2)]
    slots = torch.arange(BLOCK_CHUNKS * CHUNK_TOKENS)
    jobs = [RestoreJob((lease,), 0, slots, 60.0, (0, 1)) for lease in leases]
    for job in jobs:
        bench.engine.submit(job)
    assert begun.wait(PATIENCE_S)
    bench.engine.close()
    assert [job.state for job in jobs] == [RestoreState.CANCELLED] * 2
    assert bench.counters["restore.errors"] == 0
    release.set()
