"""Beside a device: what it was asked for is the tree's before it is there, and passes come behind it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.restore.pace import Pace
from sglang_hcache.sglang_plugin import hooks
from sglang_hcache.sglang_plugin.serving.tickets import Phase
from tests.unit.plugin.serving.ranks_in_threads import ThreadRank, in_step
from tests.unit.plugin.serving.test_restores import (
    World,
    gate_for,
    no_stamp,
    recomputing_gate,
    tokens,
)

PROMPT = tokens(1, 4)


def world_on_gpu(**more: object) -> World:
    return World(pace=Pace(no_stamp), **more)  # type: ignore[arg-type]


def begin(world: World, rid: str = "a") -> None:
    """A request comes whose prompt is in the tier; its restore starts."""
    world.store(PROMPT)
    world.queue(rid, PROMPT)
    world.coordinator.tick()


def certain_world() -> World:
    """The device is asked for all of a restore, and its slots are in the tree."""
    world = world_on_gpu()
    begin(world)
    world.engine.ask()
    world.coordinator.tick()
    return world


def test_a_request_is_admitted_when_the_device_is_asked_for_its_restore() -> None:
    world = world_on_gpu()
    begin(world)
    assert not world.coordinator.may_be_admitted("a")
    mark = world.engine.ask()
    world.coordinator.tick()
    assert world.held_up_by == [mark]
    assert world.coordinator.may_be_admitted("a")
    assert world.coordinator.running.tokens == 0
    world.tree.evict_all()  # pinned
    assert len(world.tree.match_tokens(array("q", PROMPT), None)) == len(PROMPT)
    assert world.coordinator.admitted("a", len(PROMPT)).host == len(PROMPT)
    assert world.counters["restore.done"] == 0
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.counters["restore.done"] == 1
    assert world.counters["restore.tokens"] == len(PROMPT)
    assert not len(world.coordinator.running)
    assert world.held_up_by == [mark]
    world.assert_clean()


def test_one_that_is_over_already_is_reported_in_the_same_round() -> None:
    world = world_on_gpu()
    begin(world)
    world.engine.ask()
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("a")
    assert world.counters["restore.done"] == 1
    assert not len(world.coordinator.running)
    assert not world.held_up_by, "one that is over has written; behind it another one may not have"


def test_one_that_fails_in_the_tree_ends_the_server() -> None:
    """Requests may have read what is not there."""
    world = certain_world()
    world.engine.end(RestoreState.FAILED)
    with pytest.raises(RuntimeError, match="failed on the device"):
        world.coordinator.tick()


def hidden_world() -> World:
    return world_on_gpu(gate=gate_for(1.0, may_recompute=False, project_s=1e-4))


def test_what_it_took_is_learnt_though_its_request_runs_by_then() -> None:
    """That the pace of restores changes then says nothing of it any more."""
    world, learnt = hidden_world(), []
    world.maker._gate.restored = lambda *arguments, **_: learnt.append(arguments)  # type: ignore[union-attr, method-assign]
    begin(world)
    world.engine.ask()
    world.coordinator.tick()
    world.coordinator.admitted("a", len(PROMPT))
    world.scheduler.running = True
    world.keep_pace()
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert len(learnt) == 1


def test_launching_its_requests_pass_is_no_time_of_the_restore() -> None:
    world = hidden_world()
    begin(world)
    job = world.engine.jobs[0]
    world.engine.ask()
    world.coordinator.tick()
    decision = world.coordinator.waiting.get("a").restore.decision  # type: ignore[union-attr]
    job.ended = job.submitted + 0.001
    world.coordinator.admitted("a", len(PROMPT))
    time.sleep(0.05)
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    saved_s = world.counters.measures()["restore.saved_seconds"]["sum"]
    assert decision is not None
    assert decision.recompute_s - saved_s == pytest.approx(0.001, abs=0.0005)


def test_while_requests_run_it_is_inserted_when_it_is_over() -> None:
    """Their next pass would wait for the rest of it."""
    world = world_on_gpu()
    begin(world)
    world.engine.ask()
    world.scheduler.running = True
    world.coordinator.tick()
    assert not world.held_up_by
    assert not world.coordinator.may_be_admitted("a")
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert not world.held_up_by
    assert world.coordinator.may_be_admitted("a")


def test_on_a_cpu_there_is_nothing_to_come_behind() -> None:
    world = World()
    begin(world)
    world.engine.ask()
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("a")


@pytest.mark.parametrize("is_admitted", [False, True])
def test_nobody_gets_what_the_device_still_writes_to(is_admitted: bool) -> None:
    """Passes that go by layers would write to a layer before the restore does."""
    world = certain_world()
    if is_admitted:
        world.coordinator.admitted("a", len(PROMPT))
    else:
        world.coordinator.drop("a")
    world.tree.evict_all()
    assert len(world.tree.match_tokens(array("q", PROMPT), None)) == len(PROMPT)
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    world.tree.evict_all()
    world.assert_clean()
    assert not world.tree.cached


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_passes_wait_for_all_of_it_where_some_of_its_slots_are_free(chunks: int) -> None:
    """Somebody else has computed a part of it meanwhile, so they are left over, and anybody may get them."""
    world = world_on_gpu()
    begin(world)
    mark = world.engine.ask()
    if chunks:
        computed = PROMPT[: chunks * CHUNK_TOKENS]
        slots = world.tree.allocate(len(computed))
        assert slots is not None
        world.tree.insert_tokens(array("q", computed), None, slots)
    world.coordinator.tick()
    assert world.held_up_by == [mark.as_a_whole() if chunks else mark]
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    world.coordinator.drop("a")
    world.assert_clean()


def test_room_that_a_running_request_needs_is_there_when_the_device_has_written_to_it() -> None:
    world = certain_world()
    world.coordinator.running.wait = lambda: world.engine.end(RestoreState.DONE)  # type: ignore[method-assign]
    assert world.coordinator.give_back()
    world.tree.evict_all()
    world.assert_clean()
    assert not world.tree.cached


def test_one_that_nobody_wants_keeps_its_slots_until_it_is_over() -> None:
    world = world_on_gpu()
    begin(world)
    world.engine.ask()
    world.coordinator.drop("a")
    world.coordinator.tick()
    assert not world.held_up_by
    assert world.coordinator.running.tokens == len(PROMPT)
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.coordinator.running.tokens == 0
    world.assert_clean()


def test_it_is_not_stopped_for_room() -> None:
    world = certain_world()
    world.coordinator.admitted("a", len(PROMPT))
    assert not world.coordinator.give_back()
    assert world.counters["restore.stopped_for_room"] == 0


def test_who_waits_for_the_same_chunks_finds_them_in_the_tree() -> None:
    world = world_on_gpu(gate=gate_for(1.0, may_recompute=False))
    begin(world)
    world.queue("b", PROMPT)
    world.look_again()
    assert not world.coordinator.may_be_admitted("b")
    world.engine.ask()
    world.coordinator.tick()
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("b")
    assert len(world.engine.jobs) == 1


def test_before_weights_change_the_device_is_waited_for() -> None:
    """It projects with them."""
    world = certain_world()
    restore, waits = world.coordinator.waiting.get("a").restore, []  # type: ignore[union-attr]

    def wait() -> None:
        waits.append(restore in world.coordinator.running)
        world.engine.end(RestoreState.DONE)

    world.coordinator.running.wait = wait  # type: ignore[method-assign]
    world.coordinator.invalidate()
    assert waits == [True]
    assert not len(world.coordinator.running)
    ticket = world.coordinator.waiting.get("a")
    assert ticket is not None
    assert ticket.phase is Phase.RESOLVED
    world.assert_clean()


def test_layers_that_are_recomputed_come_behind_what_the_device_still_writes() -> None:
    """They attend to the prefix, which may have been restored a moment ago."""
    world, calls = world_on_gpu(gate=recomputing_gate(2)), []
    world.coordinator._gpu.stage.passes.begin = lambda: calls.append("behind")  # type: ignore[union-attr, method-assign]
    extend = world.forward.extend

    def note(*arguments: object) -> float:
        calls.append("a piece")
        return extend(*arguments)  # type: ignore[arg-type]

    world.forward.extend = note  # type: ignore[method-assign, assignment]
    begin(world)
    world.coordinator.tick()
    assert calls == ["behind", "a piece"] * 2


@pytest.mark.parametrize(
    "mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE]
)
@pytest.mark.parametrize("rows", [[], [SimpleNamespace(rid="a", count=1)]])
def test_each_forward_pass_comes_behind_it(
    rows: list[object], mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    @contextmanager
    def one_pass(*, prefills: bool) -> Iterator[bool]:
        calls.append("layer by layer" if prefills else "behind")
        yield True
        calls.append("asked for")

    bridge = SimpleNamespace(
        saving=SimpleNamespace(begin_pass=lambda *_: False),
        one_pass=one_pass,
        kv_arrives=lambda: calls.append("its KV is of the weights in use"),
    )
    monkeypatch.setattr(hooks.batches, "rows_of", lambda _batch: rows)
    batch = SimpleNamespace(input_ids=torch.zeros(1), out_cache_loc=torch.zeros(1), forward_mode=mode)
    hooks._forward(lambda *_: calls.append("the pass"), SimpleNamespace(hcache_bridge=bridge), batch)
    first = "layer by layer" if mode in (ForwardMode.EXTEND, ForwardMode.MIXED) else "behind"
    assert calls == [first, *(["its KV is of the weights in use"] if rows else []), "the pass", "asked for"]


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_pass_beside_a_restore_says_nothing_of_how_long_passes_take(
    waits_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    bridge = SimpleNamespace(
        saving=SimpleNamespace(
            begin_pass=lambda *_: True,
            end_pass=lambda _rows, *, is_typical, **_: told.append(is_typical),
        ),
        one_pass=lambda **_: nullcontext(waits_first),
        kv_arrives=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(hooks.batches, "rows_of", lambda _batch: [SimpleNamespace(rid="a", count=1)])
    monkeypatch.setattr(hooks.batches, "is_typical", lambda _batch: True)
    batch = SimpleNamespace(
        input_ids=torch.zeros(1), out_cache_loc=torch.zeros(1), forward_mode=ForwardMode.EXTEND
    )
    runner = SimpleNamespace(hcache_bridge=bridge)
    hooks._forward(lambda *_: SimpleNamespace(can_run_graph=False), runner, batch)
    assert told == [waits_first]


def test_all_ranks_must_have_asked() -> None:
    def run(ranks: ThreadRank) -> None:
        world, rank = world_on_gpu(ranks=ranks), ranks.rank
        begin(world)
        if rank == 0:
            world.engine.ask()
        world.coordinator.tick()
        assert not world.coordinator.may_be_admitted("a")
        if rank == 1:
            world.engine.ask()
        else:
            world.engine.end(RestoreState.DONE)
        world.coordinator.tick()
        assert world.coordinator.may_be_admitted("a")
        assert len(world.held_up_by) == (1 if rank == 1 else 0), "on rank 0 it is over"
        if rank == 1:
            world.engine.end(RestoreState.DONE)
        world.coordinator.tick()
        assert not len(world.coordinator.running)

    in_step(2, run)
