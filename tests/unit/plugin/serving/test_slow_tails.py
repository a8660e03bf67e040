"""Prefixes of which host memory has the head, and a disk the rest."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.job import RestoreState
from sglang_hcache.sglang_plugin.serving.tickets import Phase
from tests.made_profiles import made_profile, reads
from tests.unit.plugin.serving.ranks_in_threads import ThreadRank, in_step
from tests.unit.plugin.serving.test_restores import CAPACITY, LAYERS, LAYOUT, ROOT, World, tokens

PROMPT = tokens(1, 16)
RUN_S = 1e-4
"""What a layer of a token takes to compute; to restore it from host memory takes a thousandth."""
SHAPE = ModelShape(
    name="x", num_layers=LAYERS, hidden_size=2, num_heads=1, num_kv_heads=1, head_size=2,
    ffn=FFNKind.GATED, ffn_size=2,
)  # fmt: skip


def gate_of(disk_s: float, **more: Any) -> RestoreGate:
    """A layer of a token takes ``disk_s`` to read from the disk."""
    tiers = {"host": reads(1e-7, 2e-7), "disk": reads(disk_s, 2 * disk_s)}
    profile = made_profile(SHAPE, tiers, project=1e-7, run=RUN_S)
    return RestoreGate(profile, LAYOUT.methods, 4096, **more)


def slow_world(disk_s: float = 1e-2, *, on_disk: int = 2, **more: Any) -> World:
    """Has all of PROMPT; the last ``on_disk`` chunks on disk."""
    world = World(gate_of(disk_s), **more)
    world.store(PROMPT)
    put_on_disk(world, PROMPT, 16 - on_disk)
    return world


def put_on_disk(world: World, prompt: list[int], first: int) -> None:
    """The chunks of ``prompt`` from the one of that number on."""
    far = set(chunk_keys(ROOT, prompt)[first:])
    world.tiers.on_host = lambda keys: [key not in far for key in keys]  # type: ignore[method-assign]


def restoring(world: World) -> list[int]:
    """How many chunks each of the jobs brings."""
    return [job.num_tokens // CHUNK_TOKENS for job in world.engine.jobs]


@pytest.mark.parametrize("on_disk", [0, 2, 15, 16])
def test_what_host_memory_has_is_restored_whatever_a_slow_disk_has_behind_it(on_disk: int) -> None:
    world = slow_world(on_disk=on_disk)
    world.queue("a", PROMPT)
    world.coordinator.tick()
    head = 16 - on_disk
    assert restoring(world) == [head] * (head > 0)
    assert world.counters["restore.declined_slower"] == (head == 0)
    assert world.counters["lookup.hits"] == 1
    if head:
        assert world.coordinator.running.tokens == head * CHUNK_TOKENS
        assert world.coordinator.running.backlog_s == pytest.approx(0.002, abs=0.001)
        world.engine.end(RestoreState.DONE)
        world.coordinator.tick()
    assert world.coordinator.may_be_admitted("a")
    assert world.coordinator.admitted("a", head * CHUNK_TOKENS).host == head * CHUNK_TOKENS
    assert world.counters["lookup.missed_new"] == world.counters["lookup.missed_evicted"] == 0
    world.assert_clean()


def test_what_is_not_restored_for_a_slow_disk_is_not_asked_for_again() -> None:
    """Neither in the next rounds nor when what was restored has been given back."""
    world = slow_world()
    world.queue("a", PROMPT)
    world.restore()
    (ticket,) = world.coordinator.waiting
    assert ticket.uncomputed == 2 * CHUNK_TOKENS
    assert ticket.phase is Phase.PINNED
    world.coordinator.give_back()
    for _ in range(3):
        world.tree.evictions += 1
        assert world.coordinator.may_be_admitted("a")
        world.look_again()
    assert not world.engine.jobs
    world.tree.evict_all()  # and once more from its beginning
    assert not world.coordinator.may_be_admitted("a")
    world.look_again()
    assert restoring(world) == [14]


@pytest.mark.parametrize(
    ("disk_s", "restored"),
    [(1e-7, [16]), (RUN_S / 2, [16]), (RUN_S, [14]), (3 * RUN_S, [14]), (1.0, [14])],
)
def test_the_fastest_of_the_three_is_done(disk_s: float, restored: list[int]) -> None:
    """Up to eight times as slow as computing, restoring all of it would still be faster than computing all."""
    world = slow_world(disk_s)
    assert world.maker._gate is not None
    assert world.maker._gate.decide({"host": 14 * CHUNK_TOKENS, "disk": 2 * CHUNK_TOKENS}, 0).pays() is (
        disk_s < 8 * RUN_S
    )
    world.queue("a", PROMPT)
    world.coordinator.tick()
    assert restoring(world) == restored


def test_all_is_restored_if_so_configured() -> None:
    world = slow_world(config=HCacheConfig(restore="always"))
    world.queue("a", PROMPT)
    world.coordinator.tick()
    assert restoring(world) == [16]


@pytest.mark.parametrize(("on_disk", "restored"), [(10, [10]), (0, [])])
def test_what_is_restored_ends_where_the_disk_begins(on_disk: int, restored: list[int]) -> None:
    """Nothing is where that has the first chunk."""
    world = slow_world()
    there = chunk_keys(ROOT, PROMPT)[on_disk]
    world.tiers.on_host = lambda keys: [key != there for key in keys]  # type: ignore[method-assign]
    world.queue("a", PROMPT)
    world.coordinator.tick()
    assert restoring(world) == restored
    assert world.counters["restore.declined_slower"] == (0 if restored else 1)


def test_room_is_needed_for_what_is_restored_only() -> None:
    world = slow_world()
    world.scheduler.running, world.scheduler.reserved = True, CAPACITY - 14 * CHUNK_TOKENS
    world.queue("a", PROMPT)
    world.coordinator.tick()
    assert restoring(world) == [14]


def served(world: World, number: int) -> list[int]:
    """One more request with PROMPT, as if it were alone; those of its restores that take too long, or fail, read the
    disk. What each brought, or did not.
    """
    rid, started = f"r{number}", []
    world.queue(rid, PROMPT)
    world.look_again()
    while world.engine.jobs:
        started += restoring(world)
        is_whole = started[-1] == 16
        late_s = world.engine.jobs[0].deadline_s if is_whole else None
        world.engine.end(RestoreState.FAILED if is_whole else RestoreState.DONE, late_after_s=late_s)
        world.coordinator.tick()
    assert world.coordinator.may_be_admitted(rid)
    world.coordinator.admitted(rid, len(world.tree.match_tokens(array("q", PROMPT), None)))
    world.scheduler.line.clear()
    world.tree.evict_all()
    return started


def test_now_and_then_the_disk_is_tried() -> None:
    """Else nobody would notice that it is fast again. If it is not, the head comes after all."""
    world = slow_world()
    started = [served(world, number) for number in range(100)]
    tried = [number for number, found in enumerate(started) if found != [14]]
    assert tried == [31, 95]
    assert [started[number] for number in tried] == [[16, 14]] * 2
    assert world.counters["restore.try_late"] == 2
    assert world.counters["restore.declined_slower"] == 0
    world.assert_clean()


def test_one_that_is_tried_takes_no_longer_than_the_head_and_the_rest() -> None:
    world = slow_world(on_disk=8)
    for number in range(31):
        served(world, number)
    world.queue("a", PROMPT)
    world.look_again()
    (job,) = world.engine.jobs
    rest_s = 8 * CHUNK_TOKENS * LAYERS * RUN_S
    assert rest_s < job.deadline_s < rest_s + 0.01
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    world.coordinator.admitted("a", 16 * CHUNK_TOKENS)
    world.scheduler.line.clear()
    world.tree.evict_all()
    world.queue("b", PROMPT)
    world.look_again()
    assert restoring(world) == [16], "that one was won"


def test_one_that_is_tried_does_not_wait_for_room_but_the_head_is_restored() -> None:
    world = slow_world()
    for number in range(31):
        served(world, number)
    world.scheduler.running, world.scheduler.reserved = True, CAPACITY - 14 * CHUNK_TOKENS
    world.queue("a", PROMPT)
    world.look_again()
    world.look_again()
    assert restoring(world) == [14]


def test_a_request_that_waits_for_room_has_the_disk_tried_no_sooner() -> None:
    """It is decided about in many rounds, and counts once."""
    world = slow_world()
    world.scheduler.running, world.scheduler.reserved = True, CAPACITY - 13 * CHUNK_TOKENS
    world.queue("a", PROMPT)
    for _ in range(50):
        (ticket,) = world.coordinator.waiting
        ticket.refused = (0.0, 0)
        world.look_again()
    assert not world.engine.jobs
    world.scheduler.reserved = 0
    world.look_again()
    assert restoring(world) == [14]


@pytest.mark.parametrize("with_gate", [True, False])
def test_a_disk_that_fails_under_the_tail_costs_the_head_only_time(with_gate: bool) -> None:
    world = slow_world(1e-7)
    if not with_gate:
        world = World()
        world.store(PROMPT)
        put_on_disk(world, PROMPT, 14)
    world.queue("a", PROMPT)
    world.restore(RestoreState.FAILED)
    assert restoring(world) == [14]
    assert not world.coordinator.may_be_admitted("a")
    world.restore(RestoreState.FAILED)  # that is enough
    assert not world.engine.jobs
    assert world.coordinator.may_be_admitted("a")
    world.tree.evictions += 1
    assert world.coordinator.may_be_admitted("a")
    assert world.counters["restore.failed"] == 2
    world.assert_clean()


@pytest.mark.parametrize("on_disk", [0, 16])
def test_what_fails_of_one_tier_is_not_restored_again(on_disk: int) -> None:
    world = slow_world(1e-7, on_disk=on_disk)
    world.queue("a", PROMPT)
    world.restore(RestoreState.FAILED)
    assert world.coordinator.may_be_admitted("a")
    assert not world.engine.jobs


def test_who_waits_for_anothers_head_computes_the_rest_as_well() -> None:
    world = slow_world()
    world.queue("a", PROMPT)
    world.queue("b", PROMPT)
    world.coordinator.tick()
    assert restoring(world) == [14]
    assert not world.coordinator.may_be_admitted("b")
    world.engine.end(RestoreState.DONE)
    world.look_again()
    assert not world.engine.jobs
    assert world.coordinator.may_be_admitted("a")
    assert world.coordinator.may_be_admitted("b")


def test_all_ranks_restore_what_all_have_in_host_memory() -> None:
    """Though each has other chunks there, and only the first one predicts anything."""

    def work(ranks: ThreadRank) -> list[list[int]]:
        world = World(gate_of(1e-2) if ranks.rank == 0 else gate_of(1e-7), ranks=ranks)
        world.store(PROMPT)
        put_on_disk(world, PROMPT, 16 - 5 * ranks.rank)
        seen = [served(world, number) for number in range(33)]
        world.assert_clean()
        return seen

    of_first, of_second = in_step(2, work)
    assert of_first == of_second
    assert of_first == [[11]] * 31 + [[16, 11], [11]]
