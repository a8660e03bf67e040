"""A GPU: nobody uses what is not there yet, or overwrites what is still needed.

The device is simulated. It does its work at the worst moments that its queues allow, so a wait that is missing shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.device.streams import Mark
from sglang_hcache.restore import pipeline
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.restore.stage import NUM_BUFFERS, DeviceStage, QueuedWrite, StageSizes
from tests.unit.restore.bench import (
    BLOCK_CHUNKS,
    KV_LAYOUT,
    SLOTS,
    STAGED_ROWS,
    WIDTH,
    Bench,
    DoubleAndPosition,
    EachLayer,
    Pool,
)
from tests.unit.restore.delayed_streams import MODEL, ORDERS, DelayedMark, DelayedStreams

CHUNKS = 4


def restored_right(bench: Bench, first: int = 0) -> bool:
    """Run one job, behind a forward pass that still writes into its slots; whether the pool is right at its end."""
    streams = bench.streams
    slots = torch.randperm(SLOTS)[: CHUNK_TOKENS * (CHUNKS - first)]

    def last_pass() -> None:
        bench.pool.k[:, slots] = -1.0
        bench.pool.v[:, slots] = -1.0

    streams.put(MODEL, last_pass)
    job = bench.run(first=first, slots=slots, fence=streams.fence())
    assert job.state is RestoreState.DONE, job.error
    streams.fence().wait()  # where the job did not wait for the pass, that comes now
    key, value = bench.written(first * CHUNK_TOKENS)
    return torch.equal(bench.pool.k[:, slots, 0], key) and torch.equal(bench.pool.v[:, slots, 0], value)


PLACES: dict[str, dict[str, Any]] = {
    "read": {},
    "in place": {"in_place": True},
    "scattered": {"scattered": True},
    "K and V, read": {"layout": KV_LAYOUT},
    "K and V, in place": {"layout": KV_LAYOUT, "in_place": True},
    "K and V, scattered": {"layout": KV_LAYOUT, "scattered": True},
}
"""What is stored, how chunks lie in host memory, and whether the device copies them from there."""


def device_bench(order: str, seed: int, place: str, eager: int = 0) -> Bench:
    return Bench(CHUNKS, streams=DelayedStreams(order, seed, eager), **PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [0, 1])
def test_the_pool_is_right_when_the_job_is_done(order: str, place: str, eager: int) -> None:
    for seed in range(4):
        bench = device_bench(order, seed, place, eager)
        for first in (0, 2, 1):
            assert restored_right(bench, first)
            assert not bench.streams.num_waiting, "the job is over, and so is all that it asked for"
        bench.engine.close()


def _ignored(*_: object) -> None:
    pass


def _no_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueuedWrite, "done", lambda _self: True)
    monkeypatch.setattr(QueuedWrite, "result", lambda _self: None)


MUTANTS: dict[str, Any] = {
    "copies into a buffer that is computed from": lambda patch: patch.setattr(
        DelayedStreams, "copy_after", _ignored
    ),
    "computes from rows that are not copied": lambda patch: patch.setattr(
        DelayedStreams, "copied", lambda _self: _there(_self)
    ),
    "writes before the last pass is over": lambda patch: patch.setattr(RestoreJob, "await_fence", _ignored),
    "is done before the device is": _no_wait_at_the_end,
    "one buffer too few is waited for": lambda patch: patch.setattr(
        DelayedStreams, "computed", lambda self: one_less(self)
    ),
}


def _there(streams: DelayedStreams) -> Mark:
    return type(streams._mark())(streams, ())


def one_less(streams: DelayedStreams) -> Mark:
    mark = streams._mark("computations")
    return type(mark)(streams, tuple((name, count - 1) for name, count in mark.counts))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    seen = []
    for order in ORDERS:
        for place in PLACES:
            bench = device_bench(order, 1, place)
            seen += [restored_right(bench, first) for first in (0, 2, 1)]
            bench.engine.close()
    assert not all(seen)


def test_nothing_stops_what_the_device_was_asked_for() -> None:
    """Its slots may be the tree's by now."""
    bench = device_bench("copies first", 0, "in place")

    def stop(job: RestoreJob) -> None:
        job.cancel()
        job.deadline_s = 0.0

    bench.when_certain = stop
    job = bench.run(first=0)
    assert job.state is RestoreState.DONE, job.error


@pytest.mark.parametrize(("most_bytes", "waits"), [(2**20, False), (2**16, True)])
def test_a_restore_is_asked_for_as_a_whole_unless_it_is_large(
    most_bytes: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of four steps: 96 KiB. The pass behind it is launched meanwhile."""
    bench = Bench(6, in_place=True, streams=DelayedStreams("copies first"))
    monkeypatch.setattr(pipeline, "_MOST_ASKED_BYTES", most_bytes)
    monkeypatch.setattr(
        DelayedMark, "is_reached", lambda _mark: False
    )  # it does nothing unless somebody waits
    done: list[bool] = []
    bench.when_certain = lambda _job: done.append(any(queue.done for queue in bench.streams.queues.values()))
    assert bench.run(first=0).state is RestoreState.DONE
    assert done == [waits]


def test_what_was_stopped_before_is_not_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = device_bench("copies first", 0, "in place"), []
    bench.when_certain = asked.append
    start = DeviceStage.start

    def cancel_behind_it(stage: DeviceStage, *arguments: Any) -> Any:
        started = start(stage, *arguments)
        job = bench.engine._job
        assert job is not None
        job.cancel()
        return started

    monkeypatch.setattr(DeviceStage, "start", cancel_behind_it)
    assert bench.run(first=0).state is RestoreState.CANCELLED
    assert not asked
    assert not bench.streams.num_waiting, "somebody else may have the slots now"


def test_a_cancelled_job_leaves_nothing_in_the_queues() -> None:
    bench = device_bench("copies first", 0, "read")
    asked: list[int] = []

    def cancel_at_the_third(_layer: int) -> None:
        asked.append(0)
        if len(asked) == 3:
            raise ZeroDivisionError

    bench.tiers.before_read = cancel_at_the_third  # type: ignore[method-assign]
    assert bench.run(first=0).state is RestoreState.FAILED
    assert not bench.streams.num_waiting, "somebody else may have the slots now"


def test_an_error_between_two_layers_waits_for_the_first() -> None:
    streams = DelayedStreams("copies first")
    stage = DeviceStage(streams, StageSizes(STAGED_ROWS * 4 * WIDTH, STAGED_ROWS * 8 * WIDTH), SLOTS)
    calls: list[int] = []

    def at_the_second() -> None:
        calls.append(0)
        if len(calls) == 2:
            raise ZeroDivisionError

    rows = [StoredRows.of(layer, Method.HIDDEN, torch.ones(4, WIDTH)) for layer in range(3)]
    with pytest.raises(ZeroDivisionError):
        stage.start(rows, stage.positions(0, 4), torch.arange(4), lambda *_: None, at_the_second)
    assert not streams.num_waiting


def test_an_error_at_the_end_of_the_last_layer_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = DelayedStreams("copies first")
    stage = DeviceStage(streams, StageSizes(STAGED_ROWS * 4 * WIDTH, STAGED_ROWS * 8 * WIDTH), SLOTS)
    computed, calls = streams.computed, []

    def fails_after_the_last_layer() -> Mark:
        calls.append(0)
        if len(calls) == 3:
            raise ZeroDivisionError
        return computed()

    monkeypatch.setattr(streams, "computed", fails_after_the_last_layer)
    rows = [StoredRows.of(layer, Method.HIDDEN, torch.ones(4, WIDTH)) for layer in range(2)]
    with pytest.raises(ZeroDivisionError):
        stage.start(rows, stage.positions(0, 4), torch.arange(4), lambda *_: None, lambda: None)
    assert not streams.num_waiting


def test_rows_of_both_methods_on_the_device() -> None:
    """As the self-check does it: the model wrote them a moment ago."""
    streams, pool = DelayedStreams("the model first"), Pool()
    stage = DeviceStage(streams, StageSizes(STAGED_ROWS * 8 * WIDTH, STAGED_ROWS * 8 * WIDTH), SLOTS)
    restorer = LayerRestorer(torch.float32, pool, 1, DoubleAndPosition(), stage=stage, layers=EachLayer(pool))
    count = 3 * STAGED_ROWS + 1
    hidden, both = torch.zeros(count, WIDTH), torch.zeros(count, 2 * WIDTH)
    true_hidden, true_both = torch.randn(count, WIDTH), torch.randn(count, 2 * WIDTH)
    streams.put(MODEL, lambda: hidden.copy_(true_hidden))
    streams.put(MODEL, lambda: both.copy_(true_both))
    slots, positions = torch.randperm(SLOTS)[:count], restorer.positions(5, 5 + count)
    assert torch.equal(positions, torch.arange(5, 5 + count))
    restorer.restore([StoredRows.of(0, Method.HIDDEN, hidden)], positions, slots)
    restorer.restore([StoredRows.of(1, Method.KV, both)], positions, slots)
    assert torch.equal(pool.k[0][slots, 0], true_hidden * 2)
    assert torch.equal(pool.k[1][slots, 0], true_both[:, :WIDTH])
    assert torch.equal(pool.v[1][slots, 0], true_both[:, WIDTH:])


@pytest.mark.parametrize(
    ("most_rows", "first"),
    [(21, [(0, 1, 2), (4, 5)]), (20, [(0, 1), (2,), (4, 5)]), (13, [(0,), (1,), (2,), (4,), (5,)])],
)
def test_neighbouring_layers_of_k_and_v_are_copied_and_written_together(
    most_rows: int, first: list[tuple[int, ...]]
) -> None:
    """Layer 3 is not there, 6 and 7 are hidden states, and 9 lies elsewhere."""
    expected = [*first, (6,), (7,), (8,), (9,)]
    streams = DelayedStreams("copies first")
    stage = DeviceStage(streams, StageSizes(most_rows * 8 * WIDTH, 8 * WIDTH), SLOTS)
    stored = [
        StoredRows(
            layer,
            Method.HIDDEN if layer in (6, 7) else Method.KV,
            torch.randn(20, 2 * WIDTH),
            ((3, 7),) if layer == 9 else ((9, 5), (0, 2)),
        )
        for layer in (0, 1, 2, 4, 5, 6, 7, 8, 9)
    ]
    layers: dict[int, torch.Tensor] = {}
    written = []

    def write(staged: StoredRows, _positions: torch.Tensor, slots: torch.Tensor) -> None:
        group = dict(enumerate(staged.rows.split(len(slots)), staged.layer))
        layers.update({layer: rows.clone() for layer, rows in group.items()})
        written.append(tuple(group))

    stage.start(stored, stage.positions(0, 7), torch.arange(7), write, lambda: None)
    marks = stage.written().layers
    for group in expected:
        for layer in group:
            assert marks[layer].counts == marks[group[-1]].counts  # type: ignore[attr-defined]
        marks[group[0]].wait()
        assert written[-1] == group, "not later than needed"
    assert written == expected
    for of_layer in stored:
        rows = [of_layer.memory[first : first + count] for first, count in of_layer.spans]
        assert torch.equal(layers[of_layer.layer], torch.cat(rows))


def test_its_memory_is_bounded_and_made_once() -> None:
    streams = DelayedStreams()
    stage = DeviceStage(streams, StageSizes(STAGED_ROWS * 4 * WIDTH, STAGED_ROWS * 8 * WIDTH), SLOTS)
    buffers, positions, products = NUM_BUFFERS * STAGED_ROWS * 4 * WIDTH, 8 * SLOTS, STAGED_ROWS * 8 * WIDTH
    assert stage.num_bytes == buffers + positions + products
    assert BLOCK_CHUNKS * CHUNK_TOKENS > STAGED_ROWS, "else parts are not tried here"


@pytest.mark.parametrize(
    ("hidden", "kv", "buffer"), [(8192, 512, 2**25), (512, 512, 2**25), (10240, 20480, 2048 * 20480)]
)
def test_narrow_rows_have_buffers_for_several_layers(hidden: int, kv: int, buffer: int) -> None:
    assert StageSizes.of(hidden, kv).buffer_bytes == buffer


def test_a_position_that_the_model_does_not_have_is_an_error() -> None:
    stage = DeviceStage(DelayedStreams(), StageSizes(4, 4), 100)
    assert stage.positions(98, 100).tolist() == [98, 99]
    with pytest.raises(IndexError, match="position 100 of 100"):
        stage.positions(98, 101)
