"""Places among running requests: who waits for a restore loses none to those behind it, and no pin for want of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.sglang_plugin.serving.tickets import Phase
from sglang_hcache.sglang_plugin.serving.waiting import Patience
from tests.unit.plugin.serving.test_restores import CAPACITY, World, gate_for, tokens


def timed_world() -> tuple[World, list[float]]:
    """One request runs, and one that a tier has waits; and the time, by which it does."""
    world, now = World(), [100.0]
    world.coordinator._patience = patience = Patience(lambda: now[0])
    world.coordinator.waiting.clock = patience.now
    world.scheduler.running = True
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    return world, now


@pytest.mark.parametrize(("places", "admitted"), [(1, []), (2, ["b"]), (3, ["b", "c"]), (4, ["b", "c", "d"])])
def test_who_waits_for_its_restore_keeps_its_place(places: int, admitted: list[str]) -> None:
    world = World()
    world.scheduler.most_places = places
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    for rid in ("b", "c"):
        world.queue(rid, [7] * 10)
    world.coordinator.tick()
    world.queue("d", [7] * 10)
    assert [rid for rid in "bcd" if world.coordinator.may_be_admitted(rid)] == admitted
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert all(world.coordinator.may_be_admitted(rid) for rid in "abcd")


def test_who_waits_for_another_ones_restore_keeps_its_place_when_that_is_over() -> None:
    """Also if it ends right before SGLang looks at its queue."""
    world = World()
    world.scheduler.most_places = 2
    world.store(tokens(1, 4))
    for rid in ("first", "second"):
        world.queue(rid, tokens(1, 4))
    world.queue("new", [7] * 10)
    world.coordinator.tick()
    assert not any(world.coordinator.may_be_admitted(rid) for rid in ("first", "second", "new"))
    world.engine.end(RestoreState.DONE)
    world.coordinator.go_on()
    assert all(world.coordinator.may_be_admitted(rid) for rid in ("first", "second", "new"))


def test_whose_prefix_was_evicted_while_it_waited_keeps_its_place() -> None:
    world = World()
    world.scheduler.most_places = 1
    world.store(tokens(1, 4))
    world.tree.compute(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.queue("new", [7] * 10)
    world.tree.evict_all()
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1
    assert [world.coordinator.may_be_admitted(rid) for rid in ("a", "new")] == [False, False]


@pytest.mark.parametrize("comes_first", [True, False])
def test_our_share_of_the_pool_is_for_those_who_come_first(comes_first: bool) -> None:
    """SGLang orders its queue by priority when a place is free, and admits who is restored by then."""
    world = World()
    world.scheduler.running = world.scheduler.is_full = True
    half = CAPACITY // CHUNK_TOKENS // 2
    for number, (rid, chunks) in enumerate([("low", half), ("high", 2)]):
        world.store(tokens(number, chunks))
        world.queue(rid, tokens(number, chunks))
        world.scheduler.priorities[rid] = number if comes_first else -number
        world.coordinator.tick()
        if world.engine.jobs:
            world.engine.end(RestoreState.DONE)
            world.coordinator.tick()
    assert (phases(world, "high") == [Phase.PINNED]) == comes_first
    assert (phases(world, "low") == [Phase.PINNED]) != comes_first
    assert world.coordinator.may_be_admitted("low"), "with what of it is still on the device"


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("have_tickets", [False, True])
def test_several_that_come_at_once_do_not_take_it_either(have_tickets: bool, is_held: bool) -> None:
    world = World()
    world.scheduler.most_places = 4
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.queue("b", [7] * 10)
    world.coordinator.tick()
    if is_held:
        world.coordinator._starter.hold(60.0)
    for rid in ("c", "d", "e"):
        if have_tickets:
            world.queue(rid, [7] * 100)
        else:
            world.coordinator.newcomer()
            world.scheduler.sizes[rid] = 10, 0
            world.scheduler.line.append(rid)
    world.coordinator.tick()
    assert [rid for rid in "bcde" if world.coordinator.may_be_admitted(rid)] == ["b", "c", "d"]


def test_who_waits_for_its_restore_keeps_its_adapters_place() -> None:
    """SGLang takes one that it passes over as long as nobody before it is admitted."""
    world = World(adapters=object())
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.queue("other adapter", [7] * 10)
    world.queue("same", [7] * 10)
    world.scheduler.passed_over = {"other adapter"}
    world.coordinator.tick()
    world.queue("later", [7] * 10)
    rids = ("other adapter", "same", "later")
    assert [world.coordinator.may_be_admitted(rid) for rid in rids] == [False, True, False]
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert all(world.coordinator.may_be_admitted(rid) for rid in rids)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_running_request_gets_the_room_of_what_was_restored_a_moment_ago(is_full: bool) -> None:
    world, now = timed_world()
    world.coordinator.tick()
    world.scheduler.is_full = is_full
    world.engine.end(RestoreState.DONE)
    reap = world.coordinator.reap

    def reap_later() -> None:
        now[0] += 0.002
        reap()

    world.coordinator.reap = reap_later  # type: ignore[method-assign]
    world.coordinator.tick()
    world.coordinator.reap = reap  # type: ignore[method-assign]
    now[0] += 0.5
    world.coordinator.tick()
    assert world.coordinator.give_back()
    assert world.coordinator.waiting.pinned_tokens == 0


@pytest.mark.parametrize(("is_full", "given_back"), [(True, 0), (False, 1)])
def test_what_is_restored_is_kept_while_no_request_may_begin(is_full: bool, given_back: int) -> None:
    world, now = timed_world()
    world.restore()
    world.scheduler.is_full = is_full
    for _ in range(120):
        now[0] += 0.1
        world.coordinator.tick()
    assert world.counters["restore.pins_given_back"] == given_back


def test_it_is_for_them_though_a_later_ones_restore_ends_first() -> None:
    """The first one was refused a moment ago."""
    world = World()
    world.scheduler.running = world.scheduler.is_full = True
    half = CAPACITY // CHUNK_TOKENS // 2
    world.store(tokens(0, half))
    world.store(tokens(1, 2))
    world.queue("low", tokens(0, half))
    world.coordinator.tick()
    world.queue("high", tokens(1, 2))
    world.scheduler.priorities["high"] = 1
    world.look_again()
    assert len(world.engine.jobs) == 1, "no room in our share while that runs"
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert phases(world, "high", "low") == [Phase.RUNNING, Phase.RESOLVED]


@pytest.mark.parametrize(
    "why", ["a restore holds the rest", "it comes first", "another one behind is enough"]
)
def test_no_pin_is_given_back_in_vain(why: str) -> None:
    world = World()
    world.scheduler.running = world.scheduler.is_full = True
    pinned, others, first = {"a restore holds the rest": (2, 17, 4), "it comes first": (18, 2, 4)}.get(
        why, (10, 10, 4)
    )
    for number, chunks in enumerate((pinned, others, first)):
        world.store(tokens(number, chunks))
    world.queue("pinned", tokens(0, pinned))
    world.restore()
    world.queue("other", tokens(1, others))
    world.coordinator.tick()
    if why != "a restore holds the rest":
        world.engine.end(RestoreState.DONE)
        world.coordinator.tick()
    world.queue("first", tokens(2, first))
    world.scheduler.priorities |= {"first": 1, "pinned": 2 if why == "it comes first" else 0}
    if why == "it comes first":
        world.scheduler.passed_over = {"pinned"}
    world.look_again()
    assert phases(world, "pinned") == [Phase.PINNED]
    assert (phases(world, "first") == [Phase.RUNNING]) == (why == "another one behind is enough")


def test_no_pin_is_given_back_for_a_try() -> None:
    """It is predicted to be slower than recomputing, and nobody waits for room for it."""
    world = World(gate_for(1.0, may_recompute=False))
    world.scheduler.running = world.scheduler.is_full = True
    half = CAPACITY // CHUNK_TOKENS // 2
    for number, chunks in enumerate((half, 2)):
        world.store(tokens(number, chunks))
    world.queue("low", tokens(0, half))
    world.restore()
    gate = world.maker._gate
    assert gate is not None
    decide = gate.decide

    def slow(*args: Any, is_try: bool = False, **options: Any) -> Decision:
        return replace(decide(*args, **options), work_s=5e3, is_try=is_try)

    gate.is_due, gate.decide = lambda _: True, slow  # type: ignore[method-assign]
    world.queue("high", tokens(1, 2))
    world.scheduler.priorities["high"] = 1
    world.look_again()
    assert phases(world, "low") == [Phase.PINNED]


def test_no_pin_is_given_back_where_what_the_device_has_takes_the_room() -> None:
    """What it has of the first one's prompt may be evicted until that is to be restored."""
    world = World()
    world.scheduler.running = world.scheduler.is_full = True
    prompt = tokens(2, 16)
    for stored in (tokens(0, 3), tokens(1, 16), prompt):
        world.store(stored)
    world.queue("pinned", tokens(0, 3))
    world.restore()
    world.queue("runs", tokens(1, 16))
    world.coordinator.tick()
    world.tree.compute(prompt[: 12 * CHUNK_TOKENS])
    world.scheduler.reserved = 9 * CHUNK_TOKENS
    world.queue("first", prompt)
    world.scheduler.priorities["first"] = 1
    world.look_again()
    assert phases(world, "first", "pinned", "runs") == [Phase.PENDING, Phase.PINNED, Phase.RUNNING]


@pytest.mark.parametrize("is_due", [True, False])
def test_who_comes_first_needs_no_restore_to_be_before_one_that_runs(is_due: bool) -> None:
    world = World()
    world.scheduler.running = world.scheduler.is_full = True
    world.store(tokens(1, 4))
    world.queue("low", tokens(9, 2))
    world.queue("restored", tokens(1, 4))
    world.coordinator.tick()
    world.queue("high", tokens(8, 2))
    world.scheduler.priorities["high"] = 1
    world.look_again()
    world.scheduler.is_full, world.scheduler.most_places = False, 1
    if is_due:
        world.coordinator._starter.look_again()
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("high")
    assert world.scheduler.line == ["high", "low", "restored"]


@pytest.mark.parametrize("is_full", [True, False])
def test_whose_prefix_is_evicted_right_before_a_place_is_free_keeps_it(is_full: bool) -> None:
    """Also between two looks, and where SGLang looks at its queue in each round, as during a prompt in pieces."""
    assert evicted_before_a_place_is_free(World(), is_full) == [False, False]


def evicted_before_a_place_is_free(world: World, is_full: bool) -> list[bool]:
    """Whether somebody whose prefix was evicted, and one behind it, may be admitted then."""
    world.scheduler.running, world.scheduler.most_places = True, 0
    world.store(tokens(1, 4))
    world.tree.compute(tokens(1, 4))
    world.queue("evicted", tokens(1, 4))
    world.queue("new", [7] * 10)
    world.scheduler.is_full = is_full
    world.look_again()
    world.tree.evict_all()
    world.coordinator._starter._next_look = world.coordinator._starter._now() + 60
    world.scheduler.is_full, world.scheduler.most_places = False, 1
    world.coordinator.tick()
    return [world.coordinator.may_be_admitted(rid) for rid in ("evicted", "new")]


def phases(world: World, *rids: str) -> list[Phase | None]:
    tickets = [world.coordinator.waiting.get(rid) for rid in rids]
    return [None if ticket is None else ticket.phase for ticket in tickets]
