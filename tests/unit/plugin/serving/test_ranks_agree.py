"""Coordinators of several ranks: whatever each finds in its own tiers, their device trees stay the same."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hcache.core.errors import TierMissError
from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.sglang_plugin.serving.tickets import Phase
from sglang_hcache.tier.tiered import HOST, TieredStore
from tests.unit.plugin.serving.ranks_in_threads import ThreadRank, in_step
from tests.unit.plugin.serving.test_places import evicted_before_a_place_is_free
from tests.unit.plugin.serving.test_restores import (
    CAPACITY,
    LAYERS,
    ROOT,
    World,
    ends_when_cancelled,
    gate_for,
    tokens,
)
from tests.unit.plugin.serving.test_slow_tails import gate_of

PROMPT = tokens(1, 4)


def device_of(world: World) -> Any:
    """All of it that batches depend on."""
    tree = world.tree
    locks = {key: count for key, count in tree.locks.items() if count}
    return list(tree.cached), locks, len(tree.free_slots), world.coordinator.running.tokens


def on_two(work: Callable[[World, int], Any], **of_first: Any) -> list[Any]:
    """``work`` with the world of each rank, whose devices must be the same at its end.

    Args:
        of_first: of the world of rank 0 only.
    """

    def run(ranks: ThreadRank) -> Any:
        world = World(**(of_first if ranks.rank == 0 else {}), ranks=ranks)
        return work(world, ranks.rank), device_of(world)

    results = in_step(2, run)
    assert results[0][1] == results[1][1]
    return [result for result, _ in results]


def end(world: World, state: RestoreState = RestoreState.DONE, **more: Any) -> None:
    world.engine.end(state, **more)


def begin(world: World) -> None:
    """A request comes whose prompt is in the tier; what can be restored of it starts."""
    world.store(PROMPT)
    world.queue("a", PROMPT)
    world.coordinator.tick()


def test_what_one_has_not_is_not_restored() -> None:
    def work(world: World, rank: int) -> int:
        world.store(PROMPT[: (4 - 2 * rank) * CHUNK_TOKENS])
        world.queue("a", PROMPT)
        world.coordinator.tick()
        assert world.engine.jobs[0].num_tokens == 2 * CHUNK_TOKENS
        end(world)
        world.coordinator.tick()
        assert world.coordinator.may_be_admitted("a")
        restored = world.coordinator.admitted("a", 2 * CHUNK_TOKENS).host
        world.assert_clean()
        return restored

    assert on_two(work) == [2 * CHUNK_TOKENS] * 2


def test_what_one_has_nothing_of_is_a_miss() -> None:
    def work(world: World, rank: int) -> bool:
        if rank == 1:
            world.store(PROMPT)
        world.queue("a", PROMPT)
        return world.coordinator.may_be_admitted("a")

    assert on_two(work) == [True, True]


def test_what_another_one_has_evicted_is_not_new() -> None:
    def work(world: World, rank: int) -> tuple[int, int]:
        world.store(PROMPT)
        first = chunk_keys(ROOT, PROMPT)[0]
        while rank == 1 and first in world.tiers:
            world.tiers.host.reserve()
        world.queue("a", PROMPT)
        return world.counters["lookup.missed_new"], world.counters["lookup.missed_evicted"]

    assert on_two(work) == [(0, 1)] * 2


@pytest.mark.parametrize("state", [RestoreState.DONE, RestoreState.FAILED])
def test_what_it_saved_or_cost_is_what_the_slowest_took(state: RestoreState) -> None:
    def work(world: World, rank: int) -> float:
        begin(world)
        job = world.engine.jobs[0]
        job.ended = time.monotonic()
        job.started = job.submitted = job.ended - (5.0 if rank else 0.001)
        end(world, state if rank else RestoreState.DONE)
        world.coordinator.tick()
        world.coordinator.admitted("a", len(PROMPT))
        measures = world.counters.measures().items()
        return sum(found["sum"] for name, found in measures if name.startswith("restore.lost_seconds"))

    for lost_s in on_two(work, gate=gate_for(1e-3, may_recompute=False)):
        assert 4 < lost_s <= 5


def test_all_wait_for_the_slowest() -> None:
    def work(world: World, rank: int) -> None:
        begin(world)
        if rank == 0:
            end(world)
        for _ in range(3):
            world.coordinator.tick()
            assert not world.coordinator.may_be_admitted("a")
        if rank == 1:
            end(world)
        world.coordinator.tick()
        assert world.coordinator.may_be_admitted("a")
        assert len(world.tree.match_tokens(PROMPT, None)) == len(PROMPT)  # type: ignore[arg-type]

    on_two(work)


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_fails_the_request_is_recomputed(failing: int) -> None:
    """Its slots are free when the other has stopped as well."""

    def work(world: World, rank: int) -> None:
        begin(world)
        job = world.engine.jobs[0]
        if rank == failing:
            end(world, RestoreState.FAILED)
        world.coordinator.tick()
        assert world.coordinator.running.tokens == len(PROMPT)
        if rank != failing:
            assert job._cancelled.done()
            end(world)  # it was done when it was told
        world.coordinator.tick()
        assert world.coordinator.may_be_admitted("a")
        assert not world.tree.cached
        admission = world.coordinator.admitted("a", 0)
        assert admission.host == 0
        assert ("without a result: it failed on another rank" in str(admission.life)) == (rank != failing)
        world.assert_clean()
        outcome = "failed" if rank == failing else "failed_on_another_rank"
        assert restores_of(world) == {f"restore.{outcome}": 1}

    on_two(work)


@pytest.mark.parametrize("is_try", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_is_stopped_because_another_failed_is_not_an_abort(failing: int, is_try: bool) -> None:
    """Neither is one that is late there, whatever the other one was at."""

    def work(world: World, rank: int) -> None:
        begin(world)
        if is_try:
            (restore,) = world.coordinator.running
            restore.decision = gate_for(1.0, may_recompute=False).decide({HOST: 64}, 0, is_try=True)
        if rank == failing:
            end(world, RestoreState.FAILED, late_after_s=20.0)
        world.coordinator.tick()
        if rank != failing:
            end(world, RestoreState.CANCELLED)
        world.coordinator.tick()
        outcome = "try_late" if is_try else "late" if rank == failing else "failed_on_another_rank"
        assert restores_of(world) == {f"restore.{outcome}": 1}

    on_two(work)


def test_an_abort_is_no_failure_of_another_rank() -> None:
    """Though one rank has stopped sooner, and another was done by then."""

    def work(world: World, rank: int) -> None:
        begin(world)
        world.coordinator.drop("a")
        if rank == 1:
            end(world, RestoreState.CANCELLED)
        world.coordinator.tick()
        if rank == 0:
            end(world)
        world.coordinator.tick()
        assert restores_of(world) == {"restore.cancelled": 1}

    on_two(work)


def test_what_all_restored_is_counted() -> None:
    def work(world: World, _rank: int) -> None:
        begin(world)
        end(world)
        world.coordinator.tick()
        sums = ("restore.tokens", "restore.tokens_host", "restore.bytes_host")
        num_bytes = len(PROMPT) // CHUNK_TOKENS * world.tiers.layout.chunk_bytes
        expected = dict(zip(sums, (len(PROMPT), len(PROMPT), num_bytes), strict=True))
        assert restores_of(world) == {"restore.done": 1, **expected}

    on_two(work)


def restores_of(world: World) -> dict[str, int]:
    """What is counted of restores."""
    counted = world.counters.snapshot()
    return {name: count for name, count in counted.items() if name.startswith("restore.")}


def test_one_that_fails_while_the_ranks_agree() -> None:
    """What a rank says of a restore, it says at one moment."""

    def work(world: World, rank: int) -> None:
        begin(world)
        if rank == 1:
            end(world)
        ranks, ends = world.coordinator._ranks, iter((RestoreState.FAILED,) if rank == 0 else ())
        minimum = ranks.minimum

        def then_fail(*values: float) -> tuple[float, ...]:
            agreed = minimum(*values)
            for state in ends:
                end(world, state)
            return agreed

        ranks.minimum = then_fail  # type: ignore[method-assign]
        world.coordinator.tick()
        world.coordinator.tick()
        assert not world.tree.cached
        world.coordinator.drop("a")
        world.assert_clean()

    on_two(work)


def test_a_chunk_that_goes_between_look_up_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts, and nobody holds anything."""
    gone: list[World] = []
    lease = TieredStore.lease

    def may_be_gone(tiers: TieredStore, *keys: Any, **how: Any) -> Any:
        if any(world.tiers is tiers for world in gone):
            raise TierMissError("gone")
        return lease(tiers, *keys, **how)

    monkeypatch.setattr(TieredStore, "lease", may_be_gone)

    def work(world: World, rank: int) -> None:
        world.store(PROMPT)
        world.queue("a", PROMPT)
        if rank == 1:
            gone.append(world)
        world.coordinator.tick()
        assert not world.engine.jobs
        assert len(world.tree.free_slots) == CAPACITY
        assert not world.tiers.host._pinned
        if rank == 1:
            gone.clear()
        world.look_again()
        assert len(world.engine.jobs) == 1

    on_two(work)


@pytest.mark.parametrize(("recompute_s", "is_restored"), [(1.0, True), (1e-6, False)])
def test_the_first_decides_what_pays(recompute_s: float, is_restored: bool) -> None:
    def work(world: World, _rank: int) -> int:
        begin(world)
        assert world.coordinator.may_be_admitted("a") is not is_restored
        return len(world.engine.jobs)

    assert on_two(work, gate=gate_for(recompute_s, may_recompute=False)) == [int(is_restored)] * 2


def test_the_first_learns_that_another_was_late() -> None:
    gate = gate_for(1.0, may_recompute=False)
    before = gate.decide({"host": CHUNK_TOKENS}, 0).work_s

    def work(world: World, rank: int) -> None:
        begin(world)
        if rank == 1:
            end(world, RestoreState.FAILED, late_after_s=20.0)
        else:
            end(world)
        world.coordinator.tick()
        world.coordinator.tick()

    on_two(work, gate=gate)
    assert gate.decide({"host": CHUNK_TOKENS}, 0).work_s > 1.1 * before


def test_the_first_learns_that_another_waited_for_reads() -> None:
    """Though it did not, and projecting was predicted to decide."""
    gate = gate_for(1.0, may_recompute=False, methods=(Method.HIDDEN,) * LAYERS, project_s=1e-3)

    def work(world: World, rank: int) -> None:
        begin(world)
        world.engine.jobs[0].waited_s = 19.0 * rank
        end(world, RestoreState.FAILED, late_after_s=20.0)
        world.coordinator.tick()

    on_two(work, gate=gate)
    learnt = gate.decide({"host": CHUNK_TOKENS}, 0).drift
    assert learnt["host"] > 1.1
    assert learnt["project"] == 1.0


def test_the_clock_of_the_first_counts() -> None:
    def work(ranks: ThreadRank) -> float:
        time.sleep(0.01 * ranks.rank)
        world = World(ranks=ranks)
        world.store(PROMPT)
        world.queue("a", PROMPT)
        (ticket,) = world.coordinator.waiting
        return ticket.entered

    first, second = in_step(2, work)
    assert first == second > 0


def test_who_waits_for_nothing_is_looked_up_in_one_question() -> None:
    """However many they are: each question takes time, and comes between passes of others."""

    def work(world: World, _rank: int) -> int:
        world.scheduler.running, world.scheduler.reserved = True, CAPACITY
        for name in range(30):
            world.queue(f"{name}", tokens(name, 2))
        world.tree.evictions += 1
        before = world.coordinator._ranks.num_asked  # type: ignore[attr-defined]
        world.coordinator.tick()
        for name in range(30):
            assert world.coordinator.may_be_admitted(f"{name}")
        return int(world.coordinator._ranks.num_asked - before)  # type: ignore[attr-defined]

    assert max(on_two(work)) == 2


def test_while_nobody_is_admitted_evictions_use_up_no_attempt() -> None:
    def work(world: World, _rank: int) -> int:
        world.store(PROMPT)
        world.scheduler.is_full = True
        world.tree.compute(PROMPT)
        world.queue("a", PROMPT)  # all of it is on the device
        world.tree.evict_all()
        for _ in range(3):
            world.tree.evictions += 1
            world.coordinator.tick()
        (ticket,) = world.coordinator.waiting
        assert ticket.phase is Phase.RESOLVED
        world.scheduler.is_full = False
        world.coordinator.tick()
        assert not world.coordinator.may_be_admitted("a")
        world.coordinator.tick()
        return len(world.engine.jobs)

    assert on_two(work) == [1, 1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_devices_stay_the_same_whatever_happens(seed: int) -> None:
    """Random requests, evictions, aborts and room that runs short, the same on all; tiers and ends of jobs of each."""

    def work(world: World, rank: int) -> None:
        shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
        on_disk = own.choice((2, 4, 16))
        world.tiers.on_host = lambda keys: [key[rank] % on_disk > 0 for key in keys]  # type: ignore[method-assign]
        names = iter(range(1000))
        ends_when_cancelled(world)
        for _ in range(60):
            act(world, shared, own, names)
            world.look_again()
            for request in list(world.scheduler.waiting()):
                if world.coordinator.may_be_admitted(request.rid) and shared.random() < 0.3:
                    world.coordinator.admitted(request.rid, 0)
                    world.scheduler.line.remove(request.rid)
            # What the ranks compare themselves at each tick is less than this.
            device = device_of(world)
            assert world.coordinator._ranks.all_of(device) == [device] * 2
        while world.engine.jobs:
            end(world, own.choice((RestoreState.DONE, RestoreState.FAILED)))
        for request in list(world.scheduler.waiting()):
            world.coordinator.drop(request.rid)
        world.scheduler.line.clear()
        world.coordinator.tick()
        world.assert_clean()

    on_two(work, gate=random.Random(seed).choice((None, gate_of(1e-2), gate_of(1e-6))))


def act(world: World, shared: random.Random, own: random.Random, names: Any) -> None:
    """One thing that happens."""
    prompt = [*tokens(shared.randint(1, 4), shared.randint(1, 4)), *tokens(9, shared.randint(0, 3))]
    what = shared.choice(
        ("store", "queue", "queue", "end", "end", "drop", "evict", "compute", "give back", "busy", "switch")
    )
    if what == "store":
        kept = prompt[: own.randint(0, len(prompt) // CHUNK_TOKENS) * CHUNK_TOKENS]
        if all(key not in world.tiers.host for key in chunk_keys(ROOT, kept)):
            world.store(kept)
    elif what == "queue":
        world.queue(f"{next(names)}", prompt)
    elif what == "end" and world.engine.jobs and own.random() < 0.7:
        end(world, own.choice((RestoreState.DONE, RestoreState.DONE, RestoreState.FAILED)))
    elif what == "drop" and world.scheduler.line:
        rid = shared.choice(world.scheduler.line)
        world.coordinator.drop(rid)
        world.scheduler.line.remove(rid)
    elif what == "evict":
        world.tree.evict_one()
    elif what == "compute" and world.tree.room() >= len(prompt):
        world.tree.compute(prompt)
    elif what == "switch" and shared.random() < 0.3:
        world.coordinator.stop()
    elif what == "give back":
        world.coordinator.give_back()
    elif what == "busy":
        world.scheduler.running = shared.random() < 0.5
        world.scheduler.reserved = shared.choice((0, CAPACITY // 2))


def test_nobody_is_admitted_unrestored_when_another_turns_out_not_to_need_a_restore() -> None:
    """SGLang, which admitted nobody, looks at its queue then, in the same round."""

    def work(world: World, _rank: int) -> bool:
        def look_again() -> None:
            world.scheduler.is_full = False

        world.scheduler.look_again = look_again  # type: ignore[method-assign]
        world.scheduler.running = True
        world.store(tokens(1, 4))
        world.store(tokens(2, 6))
        world.tree.compute(tokens(2, 6))
        world.queue("evicted", tokens(2, 6))
        world.coordinator.tick()
        world.scheduler.is_full = True
        world.queue("not needed", tokens(1, 4))
        world.tree.evict_all()
        world.tree.compute(tokens(1, 4))  # by another request meanwhile
        world.coordinator.tick()
        assert not world.scheduler.is_full
        return world.coordinator.may_be_admitted("evicted")

    assert on_two(work) == [False, False]


def test_nor_when_a_restore_that_starts_behind_another_evicts_what_it_had() -> None:
    def work(world: World, _rank: int) -> bool:
        shared = tokens(0, 10)
        longer = shared + tokens(1, 10)
        world.store(longer)
        world.store(tokens(2, 6))
        world.tree.compute(tokens(3, 16))
        world.tree.compute(tokens(2, 6))
        for rid, prompt in (("first", shared), ("evicted", tokens(2, 6)), ("second", longer)):
            world.queue(rid, prompt)
        world.coordinator.tick()
        world.engine.end(RestoreState.DONE)
        world.coordinator.go_on()
        assert len(world.tree.match_tokens(array("q", tokens(2, 6)), None)) < 6 * CHUNK_TOKENS
        return world.coordinator.may_be_admitted("evicted")

    assert on_two(work) == [False, False]


def test_nor_between_two_looks() -> None:
    def work(world: World, _rank: int) -> bool:
        return evicted_before_a_place_is_free(world, is_full=False)[0]

    assert on_two(work) == [False, False]
