"""Whom a restore makes wait, and for how long: nobody for longer than computing would take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.sglang_plugin.serving import restores, running
from sglang_hcache.sglang_plugin.serving.waiting import Patience
from tests.unit.plugin.serving.test_restores import (
    CAPACITY,
    LAYERS,
    PIECE,
    Alone,
    Engine,
    World,
    gate_for,
    tokens,
)

CHUNK_S = LAYERS * CHUNK_TOKENS * 1e-4
"""To read a chunk, by ``gate_for``."""


def world_for(recompute_s: float, config: HCacheConfig | None = None) -> World:
    """Computing a token of a layer takes ``recompute_s``, and reading it 0.1 ms."""
    return World(gate_for(recompute_s, may_recompute=False), config)


def start(world: World, rid: str, prompt: list[int]) -> RestoreJob:
    """The restore of a request that comes now."""
    world.store(prompt)
    world.queue(rid, prompt)
    world.look_again()
    return world.engine.jobs[-1]


def began(job: RestoreJob, seconds_ago: float) -> None:
    job.started = time.monotonic() - seconds_ago


class SlowEngine(Engine):
    """Begins with no job."""

    def submit(self, job: RestoreJob) -> None:
        self.jobs.append(job)


# -- who comes behind a restore that runs --------------------------------------------------------


def test_the_time_that_a_restore_has_run_does_not_count_against_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_for(recompute_s=2e-4)
    job = start(world, "a", tokens(1, 10))
    job.submitted = job.started = now = 100.0
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now))
    whole_s = world.coordinator.running.backlog_s
    assert whole_s == pytest.approx(10 * CHUNK_S, rel=0.1)
    now += 0.9 * whole_s
    assert world.coordinator.running.backlog_s == pytest.approx(0.1 * whole_s)
    start(world, "b", tokens(2, 5))
    assert world.counters["restore.declined_slower"] == 0
    now += 0.3 * whole_s
    assert world.coordinator.running.backlog_s == pytest.approx(5 * CHUNK_S + 0.2 * whole_s, rel=0.1), (
        "one that is late is expected to take as long again"
    )
    now += 10 * whole_s
    assert world.coordinator.running.backlog_s == pytest.approx(5 * CHUNK_S, rel=0.1), "not less than nothing"


def test_two_restores_may_bring_the_same_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not pay to wait for the first one. Whoever ends first, the other one still brings it."""
    world = world_for(recompute_s=4e-4)
    start(world, "long", [*tokens(1, 1), *tokens(2, 11)])
    monkeypatch.setattr(world.maker, "is_worth_awaiting", lambda *_: False)
    start(world, "other", [*tokens(1, 1), *tokens(3, 6)])
    assert len(world.engine.jobs) == 2
    shared = world.engine.jobs[0].keys[0]
    coordinator = world.coordinator
    first, second = coordinator.running
    assert coordinator.running.first_with(shared) is first
    monkeypatch.undo()
    world.queue("third", [*tokens(1, 1), *tokens(4, 1)])
    coordinator.drop("other")
    world.engine.jobs.reverse()
    world.engine.end(RestoreState.CANCELLED)
    world.look_again()
    assert coordinator.running.first_with(shared) is first
    assert coordinator.running.left_s(first) > 0
    assert second not in coordinator.running
    world.engine.end(RestoreState.DONE)
    coordinator.tick()
    assert coordinator.running.leading([shared]) == 0
    assert coordinator.may_be_admitted("long")


def test_who_waits_for_a_restore_looks_again_when_that_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another one, which is not over, would bring the same chunk."""
    world = world_for(recompute_s=1e-2)
    start(world, "long", [*tokens(1, 1), *tokens(2, 9)])
    world.store([*tokens(1, 1), *tokens(4, 1)])
    world.queue("waits", [*tokens(1, 1), *tokens(4, 1)])
    world.look_again()
    assert len(world.engine.jobs) == 1
    monkeypatch.setattr(world.maker, "is_worth_awaiting", lambda *_: False)
    start(world, "other", [*tokens(1, 1), *tokens(3, 6)])
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert len(world.engine.jobs) == 2, "its own chunk, behind the shared one"


@pytest.mark.parametrize(("share_done", "waits"), [(0.0, False), (0.99, True)])
def test_a_chunk_that_another_restore_brings_is_waited_for_if_that_pays(
    share_done: float, waits: bool
) -> None:
    """One chunk of a system prompt, at the head of somebody's long history."""
    world = world_for(recompute_s=4e-4)
    job = start(world, "long", [*tokens(1, 1), *tokens(2, 14)])
    began(job, share_done * 15 * CHUNK_S)
    world.queue("short", [*tokens(1, 1), *tokens(3, 1)])
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("short") is not waits
    assert len(world.engine.jobs) == 1


def test_where_nobody_predicts_anything_it_is_waited_for() -> None:
    world = World(config=HCacheConfig(restore="always"))
    start(world, "long", [*tokens(1, 1), *tokens(2, 14)])
    world.queue("short", [*tokens(1, 1), *tokens(3, 1)])
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("short")


def test_a_restore_that_waits_for_others_for_too_long_ends_before_its_turn() -> None:
    world = world_for(recompute_s=1e-2)
    slow = start(world, "a", tokens(1, 10))
    world.coordinator._starter._engine = world.engine = SlowEngine([slow])  # type: ignore[assignment]
    behind = start(world, "b", tokens(2, 2))
    assert behind.state is RestoreState.QUEUED
    behind.deadline_s = 0.0
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("b")
    assert not world.coordinator.may_be_admitted("a")
    assert world.counters["restore.late"] == 1
    world.engine.jobs.pop()
    for block in behind.blocks:
        block.close()
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    world.coordinator.admitted("a", 10 * CHUNK_TOKENS)
    world.coordinator.drop("b")
    world.assert_clean()


# -- a long prefill behind a restore -------------------------------------------------------------


def long_prompt(passes: int) -> list[int]:
    return [9] * (passes * PIECE + 1)


def test_a_long_prefill_does_not_overtake_a_restore_that_is_nearly_over() -> None:
    world = world_for(recompute_s=2e-4)
    job = start(world, "restored", tokens(1, 4))
    for rid, passes in (("long", 8), ("one pass", 0)):
        world.queue(rid, [*long_prompt(passes), *tokens(8, 1)] if passes else tokens(7, 1))
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("long")
    assert world.coordinator.may_be_admitted("one pass")
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert job.is_over
    assert world.coordinator.may_be_admitted("restored")
    assert world.coordinator.may_be_admitted("long")


def test_it_is_not_held_back_for_ever_nor_if_others_have_computed_it(clock: Clock) -> None:
    world = world_for(recompute_s=2e-4)
    prompt = [*long_prompt(8), *tokens(8, 1)]
    world.store(tokens(1, 4))
    world.queue("restored", tokens(1, 4))
    for rid in ("long", "the same"):
        world.queue(rid, prompt)
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("long")
    world.tree.compute(prompt[: 16 * CHUNK_TOKENS])
    clock.now += 0.4
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("long"), "looked at a moment ago"
    clock.now += 0.2
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("long")
    world.tree.evict_all()
    world.coordinator.waiting.get("the same").on_device = 0  # type: ignore[union-attr]
    assert not world.coordinator.may_be_admitted("the same")
    for _ in range(40):
        clock.now += 1.0
        world.coordinator.tick()
    assert world.coordinator.may_be_admitted("the same")


def test_nor_is_it_held_back_for_a_restore_that_takes_as_long_as_itself() -> None:
    world = world_for(recompute_s=2e-4)
    start(world, "restored", tokens(1, 30))
    world.queue("long", [*long_prompt(4), *tokens(8, 1)])
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("long")


def test_who_comes_first_in_the_queue_is_not_held_back() -> None:
    world = world_for(recompute_s=2e-4)
    world.queue("long", [*long_prompt(8), *tokens(8, 1)])
    start(world, "restored", tokens(1, 4))
    assert world.coordinator.may_be_admitted("long")


@pytest.mark.parametrize("has_left", [False, True])
def test_nobody_is_held_back_for_one_that_is_passed_over_or_has_left(has_left: bool) -> None:
    world = world_for(recompute_s=1e-3)
    start(world, "restored", tokens(1, 10))
    world.queue("long", tokens(5, 24))
    world.look_again()
    assert not world.coordinator.may_be_admitted("long")
    if has_left:
        world.coordinator.drop("restored")
    else:
        world.scheduler.passed_over = {"restored"}
        world.look_again()
    assert world.coordinator.may_be_admitted("long")


# -- room behind a restore -----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [CHUNK_TOKENS, CHUNK_TOKENS + 1])
def test_nobody_takes_the_room_that_a_restored_request_will_need(answer: int) -> None:
    """Neither a request whose prompt is too short for a restore, nor one that comes behind who does not fit."""
    world = world_for(recompute_s=2e-4)
    world.scheduler.running, world.scheduler.reserved = True, CHUNK_TOKENS
    for rid, length, generates in (("first", 8, 1), ("restored", 4 * CHUNK_TOKENS, 10 * CHUNK_TOKENS)):
        world.store(tokens(1, 4))
        world.queue(rid, tokens(1, 4)[:length], new_tokens=generates)
    left = CAPACITY - (8 + 1) - (4 + 10 + 1) * CHUNK_TOKENS
    world.queue("short", tokens(2, 1)[:8], new_tokens=left - 8 - CHUNK_TOKENS)
    world.queue("next", tokens(3, 1)[:9], new_tokens=answer - 9)
    world.coordinator.tick()
    may = {rid: world.coordinator.may_be_admitted(rid) for rid in world.scheduler.line}
    fits = answer <= CHUNK_TOKENS
    assert may == {"first": True, "restored": False, "short": True, "next": fits}
    world.queue("comes now", tokens(3, 1)[:9])
    assert world.coordinator.may_be_admitted("comes now") is fits
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert all(map(world.coordinator.may_be_admitted, world.scheduler.line)), (
        "SGLang knows whom it has room for"
    )


@pytest.mark.parametrize("leaves_by", ["abort", "admission"])
def test_short_prompts_wait_behind_who_found_no_room_as_long_as_that_one_waits(leaves_by: str) -> None:
    world = world_for(recompute_s=2e-4)
    world.scheduler.running, world.scheduler.reserved = True, CAPACITY - 3 * CHUNK_TOKENS
    world.store(tokens(1, 4))
    world.queue("none left", tokens(1, 4))
    world.queue("short", tokens(2, 1)[:8])
    world.coordinator.tick()
    assert not world.coordinator.may_be_admitted("short")
    if leaves_by == "abort":
        world.coordinator.drop("none left")
    else:  # another request of the same ID
        world.coordinator.admitted("none left", 0)
    assert world.coordinator.may_be_admitted("short")


def test_with_room_for_all_nobody_waits() -> None:
    world = world_for(recompute_s=2e-4)
    world.scheduler.most_places = 102
    start(world, "restored", tokens(1, 4))
    for number in range(100):
        world.queue(f"short {number}", [number + 10])
    world.coordinator.tick()
    assert all(map(world.coordinator.may_be_admitted, world.scheduler.line[1:]))


# -- not too early, and not by a clock that goes on in a pause -----------------------------------


def test_a_restore_starts_once_its_request_is_near_the_head_of_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would lose its slots before the request runs."""
    world = world_for(recompute_s=2e-2)
    world.queue("first", [*long_prompt(4), *tokens(8, 1)])
    world.store(tokens(1, 4))
    world.queue("second", tokens(1, 4))
    world.coordinator.tick()
    assert not world.engine.jobs
    assert not world.coordinator.may_be_admitted("second")
    world.coordinator.admitted("first", 0)
    world.scheduler.line.remove("first")
    first = len(long_prompt(4)) + 8 * CHUNK_TOKENS
    world.scheduler.running, world.scheduler.chunked = True, (first - 64, 64)
    world.look_again()
    assert not world.engine.jobs, "it is computed pass by pass, and nobody else before its last one"
    world.scheduler.chunked = (64, first - 64)
    world.look_again()
    assert len(world.engine.jobs) == 1


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Alone, "now", lambda self: clock.now)
    return clock


def test_what_is_restored_survives_a_pause_of_the_scheduler(clock: Clock) -> None:
    world = World()
    start(world, "a", tokens(1, 4))
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    clock.now += 100 * restores._PIN_LIMIT_S
    world.coordinator.tick()
    assert world.coordinator.waiting.pinned_tokens
    for _ in range(int(restores._PIN_LIMIT_S) + 2):
        clock.now += 1.0
        world.scheduler.running = True
        world.coordinator.tick()
    assert not world.coordinator.waiting.pinned_tokens, "but not to wait for ever"


def test_who_is_recomputed_after_all_is_looked_at_again() -> None:
    """SGLang passed it over while it waited, and found no room for those behind it: it looks at nobody then."""
    world = world_for(recompute_s=1e-6)
    world.scheduler.running = True
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    assert not world.coordinator.may_be_admitted("a")
    world.coordinator.tick()
    assert world.counters["restore.declined_slower"] == 1
    assert world.coordinator.may_be_admitted("a")
    assert world.scheduler.looks == 1


def test_the_log_says_what_a_slow_request_waited_for(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level("INFO"):
        for rid, seconds in (("quick", 9.9), ("slow", 10.1), ("slow too, in the same minute", 19.0)):
            start(world, rid, tokens(len(rid), 2))
            clock.now += seconds
            world.engine.end(RestoreState.DONE)
            world.coordinator.tick()
            clock.now += 9.0  # SGLang has no room for it
            world.coordinator.admitted(rid, 2 * CHUNK_TOKENS)
    (line,) = [record.message for record in caplog.records if "waited" in record.message]
    assert line.startswith("hcache: request 'slow' waited 10.1 s for a restore: +0.000 queued")
    assert "restored in" in line


def test_a_client_writes_no_lines_into_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Its request's id is what it says."""
    world = World()
    with caplog.at_level("DEBUG"):
        start(world, "a\nhcache: error: b", tokens(1, 2))
        clock.now += 19.0
        world.coordinator.drop("a\nhcache: error: b")
    told = [record.message for record in caplog.records if "hcache: request" in record.message]
    assert len(told) == 2
    assert all(line.startswith(r"hcache: request 'a\nhcache: error: b'") for line in told)


def test_patience_counts_what_rounds_take() -> None:
    clock = Clock()
    patience = Patience(clock)
    for seconds in (0.25, 0.5, 1.0, 30.0, 0.25):
        clock.now += seconds
        patience.turn(is_full=False)
    assert patience.now() == 100.0 + 0.25 + 0.5 + 1.0 + 1.0 + 0.25
    clock.now += 0.5
    assert patience.now() == 100.0 + 0.25 + 0.5 + 1.0 + 1.0 + 0.25, "it never goes back"
    patience.turn(is_full=True)
    assert patience.now() == 100.0 + 0.25 + 0.5 + 1.0 + 1.0 + 0.25
