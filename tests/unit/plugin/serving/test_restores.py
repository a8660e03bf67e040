"""The coordinator against a plain stand-in for the device tree: who waits, who owns which slots."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hcache.core.config import HCacheConfig, WritePolicy
from sglang_hcache.core.errors import RestoreTimeoutError, StoreIOError
from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.restore.behind import Written
from sglang_hcache.restore.gate import IDLE, LOADED, Load, RestoreGate
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.pace import Pace
from sglang_hcache.restore.pipeline import NUM_READERS
from sglang_hcache.sglang_plugin.seam.protocols import Device, DeviceMatch, Prompt, QueuedRequest
from sglang_hcache.sglang_plugin.seam.ranks import Alone, Ranks
from sglang_hcache.sglang_plugin.serving import line, restores, starting, tickets
from sglang_hcache.sglang_plugin.serving.outcomes import Outcomes
from sglang_hcache.sglang_plugin.serving.restore_maker import RestoreMaker
from sglang_hcache.sglang_plugin.serving.restores import RestoreCoordinator
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.tickets import Phase, Ticket
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import ChunkLease, TieredStore
from tests.made_profiles import made_profile, reads

LAYERS = 3
LAYOUT = StateLayout((Method.HIDDEN,) * LAYERS, (1,) * LAYERS)
PIECE = 2 * CHUNK_TOKENS
ROOT = bytes(32)
CAPACITY = 40 * CHUNK_TOKENS


@dataclass
class ChunkTree:
    """A device cache of whole chunks: chunk key -> its slots. Locks count per chunk."""

    evictions: int = 0
    cached: dict[bytes, torch.Tensor] = field(default_factory=dict)
    locks: dict[bytes, int] = field(default_factory=dict)
    free_slots: set[int] = field(default_factory=lambda: set(range(CAPACITY)))

    def match_tokens(self, tokens: array[int], tenant: str | None) -> DeviceMatch:
        path: list[bytes] = []
        for key in chunk_keys(ROOT, tokens):
            if key not in self.cached:
                break
            path.append(key)
        slots = [self.cached[key] for key in path] or [torch.zeros(0, dtype=torch.int64)]
        return DeviceMatch(torch.cat(slots), tuple(path))  # type: ignore[arg-type]

    def match_length(self, tokens: array[int], tenant: str | None) -> int:
        return len(self.match_tokens(tokens, tenant))

    def lock(self, node: tuple[bytes, ...]) -> None:
        for key in node:
            self.locks[key] = self.locks.get(key, 0) + 1

    def unlock(self, node: tuple[bytes, ...]) -> None:
        for key in node:
            assert self.locks[key] > 0
            self.locks[key] -= 1

    def allocate(self, count: int) -> torch.Tensor | None:
        while len(self.free_slots) < count:
            if not self.evict_one():
                return None
        return torch.tensor([self.free_slots.pop() for _ in range(count)])

    def evict_one(self) -> bool:
        for key in reversed(list(self.cached)):
            if not self.locks.get(key):
                self.free(self.cached.pop(key))
                self.evictions += 1
                return True
        return False

    def free(self, slots: torch.Tensor) -> None:
        freed = set(slots.tolist())
        assert len(freed) == len(slots)
        assert not freed & self.free_slots, "a slot was freed twice"
        self.free_slots |= freed

    def insert_tokens(
        self, tokens: array[int], tenant: str | None, slots: torch.Tensor
    ) -> tuple[int, object]:
        keys = chunk_keys(ROOT, tokens)
        assert len(slots) == len(tokens)
        existing = len(self.match_tokens(tokens, tenant))
        for index, key in enumerate(keys):
            self.cached.setdefault(key, slots[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS])
        return existing, tuple(keys)

    def room(self) -> int:
        unlocked = sum(CHUNK_TOKENS for key in self.cached if not self.locks.get(key))
        return len(self.free_slots) + unlocked

    def capacity(self) -> int:
        return CAPACITY

    def compute(self, tokens: list[int]) -> None:
        """A request without restore prefilled ``tokens``."""
        have = len(self.match_tokens(array("q", tokens), None))
        slots = self.allocate(len(tokens) - have)
        assert slots is not None
        prefix = self.match_tokens(array("q", tokens), None).slots
        self.insert_tokens(array("q", tokens), None, torch.cat([prefix, slots]))

    def evict_all(self) -> None:
        while self.evict_one():
            pass


@dataclass
class Scheduler:
    running: bool = False
    reserved: int = 0
    looks: int = 0
    """How often it was told that there may be room."""
    line: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens of a request, and those that it may generate."""
    passed_over: set[str] = field(default_factory=set)
    priorities: dict[str, int] = field(default_factory=dict)
    is_full: bool = False
    """As many requests run as may."""
    most_places: int = 48
    """If not: as many more may run."""
    chunked: tuple[int, int] = (0, 0)
    """What :meth:`prefilling` says."""

    def looks_at_queue(self) -> bool:
        return not self.is_full

    def places(self) -> int:
        return 0 if self.is_full else self.most_places

    def prefilling(self) -> tuple[int, int]:
        return self.chunked

    def is_running(self) -> bool:
        return self.running

    def waiting(self) -> Iterator[QueuedRequest]:
        return (QueuedRequest(rid, *self.sizes[rid], rid in self.passed_over) for rid in list(self.line))

    def order_queue(self) -> None:
        self.line.sort(key=lambda rid: -self.priorities.get(rid, 0))

    def look_again(self) -> None:
        self.looks += 1

    def doze(self, bell: int | None) -> None:
        time.sleep(0.002)

    def reserved_tokens(self) -> int:
        return self.reserved


@dataclass
class Engine:
    """Jobs wait here until the test says how they end."""

    jobs: list[RestoreJob] = field(default_factory=list)

    def submit(self, job: RestoreJob) -> None:
        job.begin()
        self.jobs.append(job)

    def ask(self) -> Written:
        """The device is asked for all of the first one; behind what it is there."""
        written = Written(object(), {0: object()})  # type: ignore[arg-type, dict-item]
        self.jobs[0].ask(written)
        return written

    def end(self, state: RestoreState, *, late_after_s: float | None = None) -> None:
        job = self.jobs.pop(0)
        if late_after_s is not None:
            job.error, job.seconds = RestoreTimeoutError(), late_after_s
        for block in job.blocks:
            block.close()
        job.state = state


@dataclass
class Forward:
    """Notes what the coordinator lets the model compute."""

    passes: list[tuple[int, int, int]] = field(default_factory=list)
    """(first position, end, layers)."""
    slots: list[int] = field(default_factory=list)
    error: Exception | None = None

    def extend(self, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> float:
        if self.error is not None:
            raise self.error
        assert len(tokens) == len(slots)
        self.passes.append((start, len(tokens), num_layers))
        self.slots = slots.tolist()
        return 0.001


class World:
    def __init__(
        self,
        gate: RestoreGate | None = None,
        config: HCacheConfig | None = None,
        pace: Pace | None = None,
        layout: StateLayout = LAYOUT,
        ranks: Ranks | None = None,
        adapters: object = None,
    ) -> None:
        config = config or HCacheConfig()
        self.counters = Counters()
        host = HostTier(np.zeros(64 * layout.chunk_bytes, np.uint8), layout, self.counters, keep_dirty=False)
        self.tiers = TieredStore(host, None, self.counters, write_policy=WritePolicy.WRITE_BACK, run_chunks=4)
        self.tree, self.scheduler, self.engine = ChunkTree(), Scheduler(), Engine()
        self.forward = Forward()
        self.held_up_by: list[object] = []
        """What passes come behind, on a GPU."""
        device = Device(
            tree=self.tree,
            pool=None,  # type: ignore[arg-type]
            scheduler=self.scheduler,
            forward=self.forward,  # type: ignore[arg-type]
            largest_pass=PIECE,
            pass_rows=PIECE,
            cuts_prompts=True,
            staged_passes=2,
            gpu=pace  # type: ignore[arg-type]
            and SimpleNamespace(
                stage=SimpleNamespace(
                    pace=pace,
                    fence=lambda: None,
                    passes=SimpleNamespace(come_after=self.held_up_by.append, begin=lambda: None),
                )
            ),
            ranks=ranks or Alone(),
            adapters=adapters,  # type: ignore[arg-type]
        )
        self.maker = RestoreMaker(device, self.tiers, config, self.counters, block_chunks=2, gate=gate)
        self.coordinator = RestoreCoordinator(
            device,
            self.counters,
            self.maker,
            Outcomes(device, layout, self.counters, gate),
            engine=self.engine,  # type: ignore[arg-type]
            running=Running(device.ranks),
        )

    def store(self, tokens: list[int]) -> None:
        parent = ROOT
        for index, key in enumerate(chunk_keys(ROOT, tokens)):
            slot = self.tiers.host.reserve()
            assert slot is not None
            self.tiers.seal(slot, ChunkInfo(key, parent, index, bytes(16)))
            parent = key

    def queue(self, rid: str, tokens: list[int], new_tokens: int = 0) -> None:
        self.coordinator.queue(Prompt(rid, array("q", tokens), None), chunk_keys(ROOT, tokens))
        self.scheduler.sizes[rid] = len(tokens), new_tokens
        self.scheduler.line.append(rid)

    def restore(self, state: RestoreState = RestoreState.DONE) -> None:
        self.coordinator.tick()
        self.engine.end(state)
        self.coordinator.tick()

    def end_wait(self, rid: str, how: str) -> None:
        """Its request has no use for its restore any more: an ``abort`` of it, an ``update``, or ``switch off``."""
        if how == "abort":
            self.coordinator.drop(rid)
        elif how == "update":
            self.coordinator.invalidate()
        else:
            self.coordinator.stop()

    def look_again(self) -> None:
        """One more round, in which all that waits is looked at, whatever changed."""
        self.coordinator._starter.look_again()
        self.coordinator.tick()

    def keep_pace(self) -> None:
        self.maker.keep_pace(self.coordinator.waiting, self.coordinator.running)

    def assert_clean(self) -> None:
        """Nothing locked, every slot free or in the tree once."""
        assert not any(self.tree.locks.values())
        in_tree = [slot for slots in self.tree.cached.values() for slot in slots.tolist()]
        assert len(in_tree) == len(set(in_tree))
        assert set(in_tree) | self.tree.free_slots == set(range(CAPACITY))
        assert self.coordinator.running.tokens == 0


def tokens(name: int, chunks: int) -> list[int]:
    return [name] * (chunks * CHUNK_TOKENS)


@pytest.fixture
def world() -> World:
    return World()


def test_a_restore_from_request_to_admission(world: World) -> None:
    prompt = [*tokens(1, 2), *tokens(2, 3)]
    world.store(prompt)
    world.tree.compute(prompt[: 2 * CHUNK_TOKENS])
    world.queue("a", prompt)
    assert not world.coordinator.may_be_admitted("a")
    world.coordinator.tick()
    job = world.engine.jobs[0]
    assert (job.first_position, job.num_tokens) == (2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)
    assert world.coordinator.running.tokens == 3 * CHUNK_TOKENS
    assert not world.coordinator.may_be_admitted("a")
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("a")
    world.tree.evict_all()  # pinned: it stays for its request
    assert len(world.tree.match_tokens(array("q", prompt), None)) == len(prompt)
    restored = world.coordinator.admitted("a", len(prompt))
    assert (restored.host, restored.disk) == (3 * CHUNK_TOKENS, 0)
    world.assert_clean()


def test_only_tokens_that_were_used_are_reported(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    assert world.coordinator.admitted("a", 2 * CHUNK_TOKENS).host == 2 * CHUNK_TOKENS


def test_nothing_stored_means_no_waiting(world: World) -> None:
    world.queue("a", tokens(1, 4))
    assert world.coordinator.may_be_admitted("a")
    assert world.coordinator.may_be_admitted("never heard of")


def test_a_failed_restore_gives_everything_back_and_is_not_tried_again(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore(RestoreState.FAILED)
    assert world.coordinator.may_be_admitted("a")
    world.tree.evictions += 1
    assert world.coordinator.may_be_admitted("a")
    world.assert_clean()


def test_two_requests_for_one_prefix_restore_it_once(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.queue("b", tokens(1, 4))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1
    assert not world.coordinator.may_be_admitted("b")
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("b")
    assert world.coordinator.admitted("a", 4 * CHUNK_TOKENS).host == 4 * CHUNK_TOKENS
    assert world.coordinator.admitted("b", 4 * CHUNK_TOKENS).host == 0  # it found them on the device
    world.assert_clean()


def test_who_waits_for_anothers_restore_is_not_looked_up_in_every_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread decodes for others between: a hundred requests of one long prompt must not cost them."""
    world.store(tokens(1, 4))
    for rid in "abc":
        world.queue(rid, tokens(1, 4))
    world.coordinator.tick()
    looked_up = []
    match = world.tree.match_tokens
    monkeypatch.setattr(world.tree, "match_tokens", lambda *key: looked_up.append(key) or match(*key))
    for _ in range(10):
        world.coordinator.tick()
        assert not any(world.coordinator.may_be_admitted(rid) for rid in "abc")
    assert not looked_up
    world.engine.end(RestoreState.FAILED)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("a")
    assert len(world.engine.jobs) == 1, "the next one tries itself"
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert all(world.coordinator.may_be_admitted(rid) for rid in "bc")


def test_a_restore_that_starts_does_not_look_at_those_that_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds may start in one round: each looking at all before it would stop the scheduler for seconds."""
    for name in range(16):
        world.store(tokens(name, 1))
        world.queue(str(name), tokens(name, 1))
    looks: list[RestoreJob] = []
    num_tokens = RestoreJob.num_tokens.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(RestoreJob, "num_tokens", property(lambda job: looks.append(job) or num_tokens(job)))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 16
    assert max(looks.count(job) for job in world.engine.jobs) < 8
    for _ in range(16):
        world.engine.end(RestoreState.FAILED)
    world.coordinator.tick()
    world.assert_clean()


def test_who_waits_for_anothers_restore_holds_up_nobody(world: World) -> None:
    for name in (1, 2, 3):
        world.store(tokens(name, 4))
    for rid, name in (("a", 1), ("same", 1), ("b", 2)):
        world.queue(rid, tokens(name, 4))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 2
    world.queue("c", tokens(3, 4))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 3


def test_chunks_that_go_before_they_are_held_leave_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*tokens(1, 2), *tokens(2, 3)]
    world.store(prompt)
    world.tree.compute(tokens(1, 2))
    world.queue("a", prompt)
    lease, leased = world.tiers.lease, []

    def go(keys: list[bytes], *, promote: bool) -> ChunkLease:
        if leased:
            world.tiers.clear()
        leased.append(lease(keys, promote=promote))
        return leased[-1]

    monkeypatch.setattr(world.tiers, "lease", go)
    world.coordinator.tick()
    assert len(leased) == 1, "the second block is gone"
    world.assert_clean()
    assert world.tiers.host.counts().free == world.tiers.host.num_slots
    world.look_again()
    assert world.coordinator.may_be_admitted("a")
    assert not world.engine.jobs


def test_what_somebody_computed_meanwhile_is_not_kept_twice(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    world.tree.compute(tokens(1, 2))
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    world.assert_clean()
    assert len(world.tree.cached) == 4


@pytest.mark.parametrize("state", [RestoreState.DONE, RestoreState.CANCELLED, RestoreState.FAILED])
def test_an_abort_frees_slots_only_when_the_job_is_over(world: World, state: RestoreState) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    free = len(world.tree.free_slots)
    world.coordinator.drop("a")
    world.coordinator.tick()
    assert len(world.tree.free_slots) == free
    world.engine.end(state)
    world.coordinator.tick()
    world.assert_clean()
    assert len(world.tree.free_slots) == CAPACITY
    assert world.counters[f"restore.{state.value}"] == 1


def test_who_waits_when_the_tier_is_switched_off_is_recomputed(world: World) -> None:
    """At once, and also if it is on again: nobody looks for them any more. What is there for one serves it."""
    for name, rid in enumerate(("pinned", "running", "pending")):
        world.store(tokens(name, 4))
        world.queue(rid, tokens(name, 4))
        if rid == "pinned":
            world.restore()
        if rid == "running":
            world.coordinator.tick()
            world.scheduler.running, world.scheduler.reserved = True, CAPACITY
    world.queue("a miss", tokens(9, 4))
    world.coordinator.tick()
    phases = world.coordinator.waiting.phases()
    assert phases == {"pinned": 1, "running": 1, "pending": 1, "resolved": 1}
    world.coordinator.stop()
    world.scheduler.reserved = 0
    world.store(tokens(9, 4))
    assert all(world.coordinator.may_be_admitted(rid) for rid in world.scheduler.line)
    world.tree.evictions += 1
    world.look_again()
    assert all(world.coordinator.may_be_admitted(rid) for rid in world.scheduler.line)
    assert len(world.engine.jobs) == 1, "that of the one that was running, which is being stopped"
    world.engine.end(RestoreState.CANCELLED)
    world.coordinator.tick()
    assert world.coordinator.admitted("pinned", 4 * CHUNK_TOKENS).host == 4 * CHUNK_TOKENS
    for rid in ("running", "pending", "a miss"):
        assert world.coordinator.admitted(rid, 0).host == 0
    world.assert_clean()
    assert world.counters["restore.cancelled"] == 1


def test_aborts_in_other_phases(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("pending", tokens(1, 4))
    world.coordinator.drop("pending")
    world.queue("pinned", tokens(1, 4))
    world.restore()
    world.coordinator.drop("pinned")
    world.assert_clean()


def test_running_requests_keep_their_reserve(world: World) -> None:
    world.store(tokens(1, 4))
    world.scheduler.running = True
    world.scheduler.reserved = CAPACITY - 3 * CHUNK_TOKENS
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    assert not world.engine.jobs
    world.scheduler.reserved -= CHUNK_TOKENS
    world.look_again()
    assert world.engine.jobs


@pytest.mark.parametrize(("share", "at_once"), [(0.3, 1), (0.5, 1), (0.8, 2)])
def test_restores_share_the_pool_with_the_rest(
    share: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much of it is in flight or pinned at most, but one restore may always run alone. Here each needs 0.35."""
    monkeypatch.setattr(line, "_MOST_HELD", share)
    world = World()
    for name in (1, 2):
        world.store(tokens(name, 14))
        world.queue(f"r{name}", tokens(name, 14))
    world.coordinator.tick()
    assert len(world.engine.jobs) == at_once
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert len(world.engine.jobs) == at_once - 1  # the first one is pinned
    world.coordinator.admitted("r1", 14 * CHUNK_TOKENS)
    world.scheduler.line.remove("r1")
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1


def test_pins_that_block_the_queue_are_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restores, "_HOLD_S", 60.0)
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    for _ in range(restores._STALLED_TICKS - 1):
        assert any(world.tree.locks.values())
        world.coordinator.tick()
    assert not any(world.tree.locks.values())
    assert world.coordinator.may_be_admitted("a")
    world.tree.evict_all()
    assert not world.coordinator.may_be_admitted("a")  # evicted before admission: one more restore
    world.coordinator.tick()
    assert not world.engine.jobs  # but first, whoever was blocked gets the room
    world.coordinator._starter._holding_until = 0.0
    world.restore()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    world.assert_clean()


@pytest.fixture
def clock(world: World, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """By which requests wait for room: it goes on as a test says, however busy the machine is."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(world.coordinator.waiting, "clock", lambda: clock.now)
    return clock


def test_who_finds_no_room_with_nobody_before_it_waits_for_it(world: World, clock: SimpleNamespace) -> None:
    """However long: its prefill would need as much, and SGLang admits nobody behind it either."""
    world.scheduler.running = True
    world.scheduler.reserved = CAPACITY
    for name in range(1, 4):
        world.store(tokens(name, 4))
        world.queue(f"r{name}", tokens(name, 4))
    for _ in range(300):
        clock.now += 10
        world.look_again()
        assert not any(map(world.coordinator.may_be_admitted, world.scheduler.line))
    world.scheduler.reserved = 0
    world.look_again()
    assert len(world.engine.jobs) == 3


def test_who_finds_no_room_though_nothing_runs_is_recomputed_in_the_end(
    world: World, clock: SimpleNamespace
) -> None:
    world.scheduler.reserved = CAPACITY
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    clock.now += 119
    world.look_again()
    assert not world.coordinator.may_be_admitted("a")
    clock.now += 1
    world.look_again()
    assert world.coordinator.may_be_admitted("a")
    assert world.counters["restore.no_slots"] == 1


def test_who_found_no_room_behind_others_does_not_wait_for_ever_when_it_comes_first_now_and_then(
    world: World, clock: SimpleNamespace
) -> None:
    """As with priorities: others come before it again and again, and SGLang gives the room to those behind it."""
    waiting_for_room(world)
    for turn in range(13):
        clock.now += 10
        line = world.scheduler.line
        if turn % 2:
            line.insert(0, "earlier")
        else:
            line.remove("earlier")
        world.look_again()
    assert world.counters["restore.no_slots"] == 1
    assert world.coordinator.may_be_admitted("first")


def test_one_that_gives_up_takes_nobody_with_it(world: World, clock: SimpleNamespace) -> None:
    """All wait behind the first for as long as it does, and that is no reason to recompute them."""
    waiting_for_room(world)
    for name in range(2, 5):
        world.store(tokens(name, 4))
        world.queue(f"r{name}", tokens(name, 4))
    clock.now += 121
    world.look_again()
    assert world.counters["restore.no_slots"] == 1
    assert world.coordinator.waiting.phases()["pending"] == 3
    assert world.coordinator.may_be_admitted("first")
    for rid in ("earlier", "first", "later"):
        world.scheduler.line.remove(rid)
        world.coordinator.admitted(rid, 0)
    world.scheduler.reserved = 0
    world.coordinator.tick()
    assert len(world.engine.jobs) == 3


def test_restores_leave_the_room_that_those_before_them_need(world: World) -> None:
    """Else what each request that ends leaves goes to restores, and a request to be computed never finds enough."""
    world.scheduler.running = True
    world.scheduler.reserved = CAPACITY - 10 * CHUNK_TOKENS
    world.queue("computed", tokens(8, 9))
    world.store(tokens(1, 4))
    world.queue("restored", tokens(1, 4))
    world.coordinator.tick()
    assert not world.engine.jobs
    world.coordinator.admitted("computed", 0)
    world.scheduler.line.remove("computed")
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1


def test_what_those_before_it_may_generate_is_left_too(world: World) -> None:
    """SGLang admits a request only if that has room as well."""
    world.store(tokens(1, 4))
    world.queue("computed", tokens(8, 4), new_tokens=CAPACITY - 7 * CHUNK_TOKENS)
    world.queue("restored", tokens(1, 4))
    world.coordinator.tick()
    assert not world.engine.jobs


def test_who_is_passed_over_holds_nobody_back(world: World) -> None:
    """For want of a place for its adapter. Nothing is restored for it meanwhile."""
    world.scheduler.running = True
    world.store(tokens(1, 4))
    world.store(tokens(2, 4))
    world.queue("passed over", tokens(1, 4), new_tokens=CAPACITY - 5 * CHUNK_TOKENS)
    world.queue("behind", tokens(2, 4))
    world.queue("miss", tokens(3, 4))
    world.scheduler.passed_over = {"passed over"}
    world.coordinator.tick()
    assert [list(job.keys) for job in world.engine.jobs] == [chunk_keys(ROOT, tokens(2, 4))]
    assert world.coordinator.may_be_admitted("miss")
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("behind")
    world.coordinator.admitted("behind", 4 * CHUNK_TOKENS)
    world.scheduler.line.remove("behind")
    world.scheduler.passed_over.clear()
    assert not world.coordinator.may_be_admitted("passed over")
    world.coordinator.tick()
    assert [list(job.keys) for job in world.engine.jobs] == [chunk_keys(ROOT, tokens(1, 4))]


def test_what_those_before_it_have_on_the_device_is_not_evicted_for_it(world: World) -> None:
    world.tree.compute(tokens(8, 30))
    world.store(tokens(1, 12))
    world.queue("continued", [*tokens(8, 30), *tokens(9, 1)])
    world.queue("restored", tokens(1, 12))
    world.coordinator.tick()
    assert not world.engine.jobs
    assert world.tree.evictions == 0


def test_what_many_requests_begin_with_is_counted_once(world: World) -> None:
    for name in range(10, 15):
        world.queue(f"r{name}", [*tokens(8, 20), *tokens(name, 1)])
    world.store(tokens(1, 14))
    world.queue("restored", tokens(1, 14))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1


@pytest.mark.parametrize(("own", "starts"), [(20, 2), (32, 1)])
def test_what_waits_for_anothers_restore_keeps_room_for_the_rest(world: World, own: int, starts: int) -> None:
    """Of 40 chunks: 4 are being restored for both, and it needs ``own`` more."""
    world.store(tokens(1, 4))
    world.store(tokens(3, 6))
    world.queue("first", tokens(1, 4))
    world.queue("shares its beginning", [*tokens(1, 4), *tokens(2, own)])
    world.queue("behind", tokens(3, 6))
    world.coordinator.tick()
    assert len(world.engine.jobs) == starts


def test_who_is_recomputed_does_not_wait_for_those_that_wait_for_a_restore() -> None:
    ahead = line.Ahead(lambda count, _: float(count))
    prompt = Prompt("a", array("q", tokens(1, 4)), None)
    ticket = tickets.Ticket(prompt, chunk_keys(ROOT, tokens(1, 4)), time.monotonic, Counters())
    for phase, seconds in ((tickets.Phase.PENDING, 0.0), (tickets.Phase.RESOLVED, 300.0)):
        ticket.phase = phase
        ahead.add(QueuedRequest(phase.value, 300, 0), ticket)
        assert ahead.seconds == seconds
        ahead = line.Ahead(lambda count, _: float(count))


def test_one_that_others_always_come_before_is_recomputed_in_the_end(
    world: World, clock: SimpleNamespace
) -> None:
    """With policies that change the order."""
    world.store(tokens(1, 24))
    world.queue("large", tokens(1, 24))
    for name in range(2, 5):
        world.store(tokens(name, 1))
        world.queue(f"small{name}", tokens(name, 1))
        world.scheduler.line.remove("large")
        world.scheduler.line.append("large")
        world.coordinator.tick()
        assert not world.coordinator.may_be_admitted("large")
    clock.now += 121
    world.look_again()
    assert len(world.engine.jobs) == 3
    assert world.coordinator.may_be_admitted("large")


def test_who_is_held_back_is_not_looked_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for each of the queue in each round, and each eviction changes what would be found."""
    waiting_for_room(world)
    world.tree.evictions += 1
    monkeypatch.delattr(ChunkTree, "match_tokens")
    assert not world.coordinator.may_be_admitted("later")


def test_pins_that_are_too_old_are_not_taken_by_the_next_restore(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.scheduler.running = True
    world.store(tokens(1, 18))
    world.store(tokens(2, 18))
    world.queue("a", tokens(1, 18))
    world.queue("b", tokens(2, 18))
    world.restore()
    monkeypatch.setattr(restores, "_PIN_LIMIT_S", 0.0)
    monkeypatch.setattr(restores, "_HOLD_S", 60.0)
    looks = world.scheduler.looks
    world.coordinator.tick()
    assert not any(world.tree.locks.values())
    assert not world.engine.jobs
    assert world.scheduler.looks > looks


def test_restores_start_in_the_order_of_the_queue(world: World) -> None:
    """With priorities that is not the order of arrival."""
    for name in (1, 2):
        world.store(tokens(name, 24))
        world.queue(f"r{name}", tokens(name, 24))
    world.scheduler.line.reverse()
    world.coordinator.tick()
    world.restore()
    assert world.coordinator.may_be_admitted("r2")
    assert not world.coordinator.may_be_admitted("r1")


def test_sglang_looks_at_the_queue_when_a_restore_is_over(world: World) -> None:
    """It does so by itself only when a request ends."""
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    assert world.scheduler.looks == 0
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert world.scheduler.looks == 1


def test_new_weights_end_everything(world: World) -> None:
    """What is RUNNING is cancelled and its slots come back; nobody restores chunks of the old weights afterwards."""
    for name in (1, 2, 3):
        world.store(tokens(name, 4))
        world.queue(f"r{name}", tokens(name, 4))
    world.restore()
    assert world.coordinator.waiting.phases() == {"resolved": 0, "pending": 0, "running": 2, "pinned": 1}

    def finish_cancelled() -> None:
        while world.engine.jobs:
            world.engine.end(RestoreState.CANCELLED)

    world.coordinator.running.wait = finish_cancelled  # type: ignore[method-assign, assignment]
    world.coordinator.invalidate()
    world.assert_clean()
    world.tree.evict_all()
    world.coordinator.tick()
    assert not world.engine.jobs
    assert all(world.coordinator.may_be_admitted(f"r{name}") for name in (1, 2, 3))


def test_requests_with_one_prefix_are_not_late_one_after_the_other() -> None:
    """They wait for the first one's restore. After the second late one the others are recomputed."""
    world = World(gate_for(1e-3, may_recompute=False))
    world.store(tokens(1, 4))
    rids = ("a", "b", "c", "d")
    for rid in rids:
        world.queue(rid, tokens(1, 4))
    world.coordinator.tick()
    for pending in (3, 2):
        assert world.coordinator.waiting.phases()["pending"] == pending
        (job,) = world.engine.jobs
        world.engine.end(RestoreState.FAILED, late_after_s=job.deadline_s)
        world.look_again()
    assert not world.engine.jobs
    assert all(world.coordinator.may_be_admitted(rid) for rid in rids)
    assert world.counters["restore.late"] == 2


def ends_when_cancelled(world: World) -> None:
    """The engine ends jobs that are cancelled while somebody waits for that."""

    def end() -> None:
        jobs = world.engine.jobs
        jobs.sort(key=lambda job: not job._cancelled.done())
        while jobs and jobs[0]._cancelled.done():
            world.engine.end(RestoreState.CANCELLED)

    world.coordinator.running.wait = end  # type: ignore[method-assign, assignment]


def test_a_running_request_that_needs_room_stops_the_newest_restore(world: World) -> None:
    """SGLang would end it with "out of memory": what is being restored is in no tree that it could evict."""
    ends_when_cancelled(world)
    for name in (1, 2, 3):
        world.store(tokens(name, 4))
        world.queue(f"r{name}", tokens(name, 4))
    world.coordinator.tick()
    free = len(world.tree.free_slots)
    assert world.coordinator.give_back()
    assert len(world.tree.free_slots) == free + 4 * CHUNK_TOKENS
    assert world.counters["restore.stopped_for_room"] == 1
    assert world.coordinator.waiting.phases() == {"resolved": 0, "pending": 1, "running": 2, "pinned": 0}
    assert not world.coordinator.may_be_admitted("r3"), "its restore starts again when there is room"
    world.coordinator.tick()
    assert len(world.engine.jobs) == 3
    assert all(world.coordinator.give_back() for _ in range(3))
    assert not world.coordinator.give_back()
    assert world.coordinator.waiting.phases() == {"resolved": 1, "pending": 2, "running": 0, "pinned": 0}
    assert world.coordinator.may_be_admitted("r3"), "stopped twice, it is recomputed"
    for name in (1, 2, 3):
        world.coordinator.drop(f"r{name}")
    world.assert_clean()


def test_pins_go_before_restores_that_run(world: World) -> None:
    world.store(tokens(1, 4))
    world.store(tokens(2, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    world.queue("b", tokens(2, 4))
    world.coordinator.tick()
    assert world.coordinator.give_back()
    assert world.coordinator.waiting.phases() == {"resolved": 1, "pending": 0, "running": 1, "pinned": 0}


def test_a_restore_that_does_not_stop_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restores, "_STOP_S", 0.02)
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    assert not world.coordinator.give_back()
    assert world.coordinator.running.tokens == 4 * CHUNK_TOKENS
    world.engine.end(RestoreState.CANCELLED)
    world.coordinator.drop("a")
    world.coordinator.tick()
    world.assert_clean()


def test_a_pause_of_the_scheduler_is_none_of_a_restores_time(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    (job,) = world.engine.jobs
    before, began = job.deadline_s, time.monotonic()
    for _ in range(10):
        world.coordinator.pause()
    assert job.deadline_s - before == pytest.approx(time.monotonic() - began, rel=0.2)
    assert job.deadline_s - before > 0.01, "nobody spins meanwhile"


def test_what_the_device_computed_in_a_pause_counts_once(world: World) -> None:
    """The time until it was over is none of the restore's either way."""
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    (job,) = world.engine.jobs
    before_s = job.deadline_s

    def doze(_bell: int | None) -> None:
        time.sleep(0.05)
        job.fenced_until = time.monotonic()

    world.scheduler.doze = doze  # type: ignore[method-assign]
    world.coordinator.pause()
    (restore,) = world.coordinator.running
    assert 0 <= restore.paused_s < 0.025
    assert job.deadline_s - before_s == pytest.approx(restore.paused_s)


def test_one_that_ends_in_a_pause_took_no_less_than_nothing() -> None:
    world = World(gate_for(1.0, may_recompute=False))
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    (job,) = world.engine.jobs
    (restore,) = world.coordinator.running

    def doze(_bell: int | None) -> None:
        job.submitted = job.ended = time.monotonic()
        world.engine.end(RestoreState.DONE)
        time.sleep(0.01)

    world.scheduler.doze = doze  # type: ignore[method-assign]
    world.coordinator.pause()
    world.coordinator.tick()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    assert restore.decision is not None
    assert world.counters.measures()["restore.saved_seconds"]["sum"] == restore.decision.recompute_s


@pytest.mark.parametrize("promoted_s", [0.0, 0.09, 0.9, 2.0])
def test_what_a_restore_took_to_promote_teaches_nothing(
    promoted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the rest does: else a slow disk of which all restores promote would never be known."""
    told = []
    monkeypatch.setattr(ChunkLease, "copied_s", promoted_s * NUM_READERS / 3)  # in each of three blocks
    gate = gate_for(recompute_s=1.0, may_recompute=False)
    gate.restored = lambda _, seconds, *__, others_s, waited_s, **___: told.append(  # type: ignore[method-assign]
        (seconds, others_s, waited_s)
    )
    world = World(gate)
    world.store(tokens(1, 6))
    world.queue("a", tokens(1, 6))
    world.coordinator.tick()
    world.engine.jobs[0].seconds, world.engine.jobs[0].waited_s = 1.0, 0.5
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    in_waits_s = min(promoted_s, 0.5)
    assert told == [pytest.approx((1.0 - in_waits_s, 1.0 - in_waits_s, 0.5 - in_waits_s))]


@pytest.mark.parametrize("pauses", [False, True])
def test_what_a_restore_took_beside_a_pause_teaches_nothing(pauses: bool) -> None:
    gate = gate_for(recompute_s=1.0, may_recompute=False)
    world = World(gate)
    world.store(tokens(1, 6))
    world.queue("a", tokens(1, 6))
    world.coordinator.tick()
    if pauses:
        world.coordinator.pause()
    world.engine.jobs[0].seconds = 100.0
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert (set(gate._drift.factors.values()) == {1.0}) == pauses


def waiting_for_room(world: World) -> None:
    world.store(tokens(1, 4))
    world.scheduler.running = True
    world.scheduler.reserved = CAPACITY
    world.queue("earlier", tokens(8, 4))
    world.queue("first", tokens(1, 4))
    world.queue("later", tokens(9, 4))
    world.coordinator.tick()


def test_nobody_overtakes_who_waits_for_room(world: World) -> None:
    waiting_for_room(world)
    assert world.coordinator.may_be_admitted("earlier")
    assert not world.coordinator.may_be_admitted("first")
    assert not world.coordinator.may_be_admitted("later")
    world.scheduler.running = False  # nobody is left who could make room: nothing to hold back for
    assert world.coordinator.may_be_admitted("later")
    world.scheduler.running = True
    world.scheduler.line.insert(0, world.scheduler.line.pop())
    world.look_again()
    assert world.coordinator.may_be_admitted("later"), "it comes first in the scheduler's order"


def test_who_comes_before_it_is_not_held_back(world: World) -> None:
    """Not one that was passed over a moment ago, nor one that comes only now."""
    waiting_for_room(world)
    world.scheduler.passed_over = {"earlier"}
    world.look_again()
    assert world.coordinator.may_be_admitted("earlier")
    world.queue("urgent", tokens(7, 1))
    world.scheduler.line.insert(0, world.scheduler.line.pop())
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("urgent")
    assert not world.coordinator.may_be_admitted("later")


def test_who_waits_for_room_that_another_restore_holds_is_overtaken(world: World) -> None:
    """That one gives it back by itself."""
    half = CAPACITY // CHUNK_TOKENS // 2
    world.scheduler.running = True
    world.store(tokens(1, half))
    world.queue("first", tokens(1, half))
    world.store(tokens(2, 4))
    world.queue("second", tokens(2, 4))
    world.queue("miss", tokens(3, 1))
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1
    assert world.coordinator.may_be_admitted("miss")
    world.engine.end(RestoreState.DONE)
    world.look_again()
    assert world.coordinator.waiting.phases() == {"resolved": 1, "pending": 1, "running": 0, "pinned": 1}
    assert world.coordinator.may_be_admitted("miss")


def test_once_it_is_restored_others_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LOOK_AGAIN_S", 0.0)
    waiting_for_room(world)
    world.scheduler.reserved = 0
    world.coordinator.tick()
    assert len(world.engine.jobs) == 1
    assert world.coordinator.may_be_admitted("later")


def test_whether_there_is_room_is_not_looked_at_in_every_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_LOOK_AGAIN_S", 60.0)
    waiting_for_room(world)
    world.scheduler.reserved = 0
    world.coordinator.tick()
    assert not world.engine.jobs
    world.look_again()
    assert world.engine.jobs


def test_a_round_in_which_nobody_waits_asks_nobody_anything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nearly all are while requests decode."""
    monkeypatch.setattr(world.coordinator, "scheduler", None)
    monkeypatch.setattr(world.coordinator, "_tree", None)
    monkeypatch.setattr(world.coordinator._starter, "line", None)
    monkeypatch.setattr(world.coordinator, "_maker", None)
    world.coordinator.tick()


def test_what_those_behind_the_last_that_waits_need_is_not_added_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue may hold a thousand requests for which nothing is stored, and is looked at in each round that admits."""
    world.store(tokens(1, 1))
    world.queue("before", tokens(0, 1))
    world.queue("restored", tokens(1, 1))
    for name in range(200):
        world.queue(str(name), tokens(name, 1)[:2])
    seen: list[str] = []
    add = line.Ahead.add
    monkeypatch.setattr(line.Ahead, "add", lambda *given: seen.append(given[1].rid) or add(*given))
    world.coordinator.tick()
    assert world.engine.jobs
    assert seen[:2] == ["before", "restored"]
    assert len(seen) < 70, "whether the first ones fit beside the restore"


def test_a_restore_without_room_is_not_looked_up_again_before_it_may_need_less(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store(tokens(1, 4))
    world.scheduler.running = True
    world.scheduler.reserved = CAPACITY - 3 * CHUNK_TOKENS
    world.queue("a", tokens(1, 4))
    looked_up = []
    match = world.tree.match_tokens
    monkeypatch.setattr(world.tree, "match_tokens", lambda *key: looked_up.append(key) or match(*key))

    def lookups() -> int:
        world.look_again()
        return len(looked_up)

    monkeypatch.setattr(tickets, "_REFUSED_S", 60.0)
    assert [lookups(), lookups()] == [1, 1]
    monkeypatch.setattr(tickets, "_REFUSED_S", 0.0)
    assert lookups() == 2


def test_its_own_prefix_is_no_room_for_a_restore(world: World) -> None:
    """Locked while it runs, so it cannot be evicted for the slots; nothing else may be evicted in vain."""
    prompt = [*tokens(1, 20), *tokens(2, 12)]
    world.store(prompt)
    world.tree.compute(tokens(1, 20))
    world.tree.compute(tokens(3, 10))
    world.scheduler.reserved = 9 * CHUNK_TOKENS
    world.scheduler.running = True
    world.queue("a", prompt)
    world.coordinator.tick()
    assert not world.engine.jobs
    assert world.tree.evictions == 0
    assert not any(world.tree.locks.values())


def test_a_long_restore_may_take_as_long_as_pays() -> None:
    """Only what recomputing would take bounds it, no constant."""
    world = World(gate_for(recompute_s=5e-2, may_recompute=False), HCacheConfig(restore_deadline_s=0.1))
    world.store(tokens(1, 32))
    world.queue("long", tokens(1, 32))
    world.coordinator.tick()
    (job,) = world.engine.jobs
    recompute_s = 32 * CHUNK_TOKENS * LAYERS * 5e-2
    assert job.deadline_s == pytest.approx(1.5 * recompute_s, rel=0.1)


def test_all_there_is_is_restored_if_so_configured() -> None:
    """Slower than recomputing, too. What is predicted ends no restore, either."""
    config = HCacheConfig(restore="always", restore_deadline_s=0.5)
    world = World(gate_for(recompute_s=1e-6, may_recompute=False), config)
    world.store(tokens(1, 32))
    world.queue("long", tokens(1, 32))
    world.coordinator.tick()
    (job,) = world.engine.jobs
    assert job.deadline_s == 0.5
    assert world.counters["restore.declined_slower"] == 0


def test_now_and_then_a_restore_that_would_not_pay_is_tried() -> None:
    """It is lost here, so the next one comes later."""
    world = World(gate_for(recompute_s=1e-5, may_recompute=False))
    world.store(tokens(1, 2))
    tried = []
    for number in range(100):
        world.queue(f"r{number}", tokens(1, 2))
        world.look_again()
        if world.engine.jobs:
            tried.append(number)
            assert world.engine.jobs[0].deadline_s == 0.05
            world.engine.end(RestoreState.FAILED, late_after_s=0.05)
            world.coordinator.tick()
        assert world.coordinator.may_be_admitted(f"r{number}")
        world.coordinator.admitted(f"r{number}", 0)
        world.scheduler.line.clear()
    assert tried == [31, 95]
    assert world.counters["restore.declined_slower"] == 98
    assert (world.counters["restore.try_late"], world.counters["restore.late"]) == (2, 0)
    world.assert_clean()


def test_in_a_burst_whoever_is_restored_sooner_is_restored() -> None:
    """A request that is not restored waits for the prefills before it, as a restore does for the restores."""
    world = World(gate_for(recompute_s=5e-4, may_recompute=False))
    for name in range(8):
        world.store(tokens(name, 2))
        world.queue(f"r{name}", tokens(name, 2))
    world.coordinator.tick()
    # Restores end 1, 2, 3 and 4 fifths of a prefill after now. A fifth would end with the prefill, which is taken.
    assert world.coordinator.waiting.phases() == {"resolved": 1, "pending": 0, "running": 7, "pinned": 0}
    assert world.coordinator.may_be_admitted("r4")
    assert world.counters["restore.declined_slower"] == 1
    one_s = 2 * CHUNK_TOKENS * LAYERS * 1e-4
    running = world.coordinator.running
    assert running.backlog_s == pytest.approx(7 * one_s, rel=0.1)
    for left in range(6, -1, -1):
        world.engine.end(RestoreState.CANCELLED)
        running.take_ended()
        assert running.backlog_s == pytest.approx(left * one_s, rel=0.1)
    assert running.backlog_s == running.tokens == 0


@pytest.mark.parametrize("held_up_by", ["as many run as may", "a prompt that is computed in passes"])
def test_in_a_burst_that_has_to_wait_anyway_all_are_restored(held_up_by: str) -> None:
    world = World(gate_for(recompute_s=5e-4, may_recompute=False))
    if held_up_by == "as many run as may":
        world.scheduler.is_full = True
    else:
        world.scheduler.chunked = (4 * CHUNK_TOKENS, 0)
    for name in range(8):
        world.store(tokens(name, 2))
        world.queue(f"r{name}", tokens(name, 2))
    world.coordinator.tick()
    assert world.coordinator.waiting.phases() == {"resolved": 0, "pending": 0, "running": 8, "pinned": 0}


def test_what_is_slower_than_recomputing_is_not_restored_however_long_the_queue() -> None:
    world = World(gate_for(recompute_s=0.9e-4, may_recompute=False))
    for name in range(8):
        world.store(tokens(name, 2))
        world.queue(f"r{name}", tokens(name, 2))
    world.coordinator.tick()
    assert world.coordinator.waiting.phases()["resolved"] == 8


# -- restores that recompute their first layers --------------------------------------------------


def recomputing_gate(num_recompute: int) -> RestoreGate:
    """A gate for which it is best to recompute so many of the three layers: both resources end together then."""
    return gate_for(recompute_s=1e-4 * (LAYERS - num_recompute) / num_recompute, may_recompute=True)


def gate_for(
    recompute_s: float,
    *,
    may_recompute: bool,
    methods: tuple[Method, ...] = LAYOUT.methods,
    project_s: float = 0.0,
) -> RestoreGate:
    """A layer of a token is read in 0.1 ms."""
    shape = ModelShape(
        name="x", num_layers=LAYERS, hidden_size=2, num_heads=1, num_kv_heads=1, head_size=2,
        ffn=FFNKind.GATED, ffn_size=2,
    )  # fmt: skip
    profile = made_profile(shape, {"host": reads(1e-4, 1e-4)}, project=project_s, run=recompute_s)
    return RestoreGate(profile, methods, 64 * CHUNK_TOKENS, may_recompute=may_recompute)


@pytest.fixture
def mixing() -> World:
    """Recomputes two of three layers."""
    return World(recomputing_gate(2))


def test_layers_are_recomputed_in_pieces_behind_the_prefix(mixing: World) -> None:
    prompt = tokens(1, 6)
    mixing.store(prompt)
    mixing.tree.compute(prompt[:CHUNK_TOKENS])
    mixing.queue("a", prompt)
    mixing.coordinator.tick()
    job = mixing.engine.jobs[0]
    assert job.layers == (2,)
    assert mixing.forward.passes == [(64, 192, 2)], "at once, while the other layers are read"
    assert mixing.coordinator.running.is_recomputing
    mixing.engine.end(RestoreState.DONE)
    mixing.coordinator.tick()
    assert not mixing.coordinator.may_be_admitted("a"), "its first layers are not complete"
    mixing.coordinator.tick()
    assert mixing.forward.passes == [(64, 192, 2), (192, 320, 2), (320, 384, 2)]
    assert mixing.forward.slots[64:] == job.slots.tolist()
    assert not mixing.coordinator.running.is_recomputing
    mixing.coordinator.tick()
    assert mixing.coordinator.may_be_admitted("a")
    assert mixing.coordinator.admitted("a", len(prompt)).host == 5 * CHUNK_TOKENS
    mixing.assert_clean()


def test_only_restores_that_ended_or_were_late_say_how_fast_a_tier_is() -> None:
    gate = recomputing_gate(2)

    def drift(error: Exception, seconds: float) -> float:
        world = World(gate)
        world.store(tokens(1, 6))
        world.queue("a", tokens(1, 6))
        world.coordinator.tick()
        job = world.engine.jobs[0]
        job.error, job.seconds, job.started = error, seconds, time.monotonic() + 60
        world.engine.end(RestoreState.FAILED)
        world.coordinator.tick()
        factors = gate._drift.factors.values()
        return max(factors) * min(factors)

    assert drift(StoreIOError("damaged, at once"), 0.0) == 1
    assert drift(StoreIOError("damaged, in the end"), 5.0) == 1
    assert drift(RestoreTimeoutError(), 0.0) == 1, "it had waited for others"
    assert drift(RestoreTimeoutError(), 5.0) > 1


def test_the_job_may_end_last(mixing: World) -> None:
    mixing.store(tokens(1, 2))
    mixing.queue("a", tokens(1, 2))
    mixing.coordinator.tick()
    mixing.coordinator.tick()
    assert not mixing.coordinator.running.is_recomputing
    assert not mixing.coordinator.may_be_admitted("a")
    mixing.engine.end(RestoreState.DONE)
    mixing.coordinator.tick()
    assert mixing.coordinator.may_be_admitted("a")


def test_a_failed_job_ends_the_recomputation(mixing: World) -> None:
    mixing.store(tokens(1, 6))
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    mixing.engine.end(RestoreState.FAILED)
    mixing.coordinator.tick()
    assert len(mixing.forward.passes) == 1
    assert mixing.coordinator.may_be_admitted("a")
    mixing.assert_clean()


def test_a_failed_recomputation_ends_the_restore_when_its_job_has_ended(mixing: World) -> None:
    mixing.store(tokens(1, 6))
    mixing.forward.error = RuntimeError("injected")
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    assert not mixing.coordinator.may_be_admitted("a"), "the job may still write to the slots"
    assert mixing.coordinator.running.tokens == 6 * CHUNK_TOKENS
    mixing.engine.end(RestoreState.DONE)  # it did not look at its cancellation any more
    mixing.coordinator.tick()
    assert mixing.coordinator.may_be_admitted("a")
    admission = mixing.coordinator.admitted("a", 0)
    assert admission.host == 0
    assert "ends without a result: its first layers were not recomputed" in str(admission.life)
    assert len(mixing.tree.match_tokens(array("q", tokens(1, 6)), None)) == 0
    assert mixing.counters["restore.errors"] == 1
    outcomes = "restore.failed", "restore.done", "restore.tokens"
    assert [mixing.counters[name] for name in outcomes] == [1, 0, 0], "though its job has brought its layers"
    mixing.assert_clean()


def test_a_recomputation_that_runs_out_of_time_is_late(
    mixing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(_job: RestoreJob) -> None:
        raise RestoreTimeoutError("not restored within 10 s")

    monkeypatch.setattr(RestoreJob, "check", too_late)
    mixing.store(tokens(1, 6))
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    mixing.engine.end(RestoreState.DONE)
    mixing.coordinator.tick()
    assert [mixing.counters[f"restore.{how}"] for how in ("late", "failed", "done")] == [1, 0, 0]
    mixing.coordinator.admitted("a", 0)
    mixing.assert_clean()


def test_an_abort_ends_the_recomputation(mixing: World) -> None:
    mixing.store(tokens(1, 6))
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    mixing.coordinator.drop("a")
    mixing.coordinator.tick()
    assert len(mixing.forward.passes) == 1
    mixing.engine.end(RestoreState.CANCELLED)
    mixing.coordinator.tick()
    mixing.assert_clean()


@pytest.mark.parametrize("how", ["abort", "update", "switch off"])
@pytest.mark.parametrize("pauses", [0, 10])
def test_first_layers_that_are_stopped_end_then(mixing: World, how: str, pauses: int) -> None:
    """And not with the job, which ended long before: they waited for another restore's, or in a pause."""
    mixing.store(tokens(1, 6))
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    (job,) = mixing.engine.jobs
    (restore,) = mixing.coordinator.running
    job.submitted -= 100.0
    job.ended = restore.last_computed = job.submitted
    mixing.engine.end(RestoreState.DONE)
    for _ in range(pauses):
        mixing.coordinator.pause()
    mixing.end_wait("a", how)
    mixing.coordinator.reap()
    mixing.coordinator.reap()
    lost = mixing.counters.measures()["restore.lost_seconds_cancelled"]
    assert lost == {"count": 1, "sum": pytest.approx(100.0, abs=0.9)}
    mixing.assert_clean()


def test_a_recomputation_that_overruns_the_deadline_is_given_up(mixing: World) -> None:
    mixing.store(tokens(1, 6))
    mixing.queue("a", tokens(1, 6))
    mixing.coordinator.tick()
    mixing.engine.jobs[0].deadline_s = 0.0
    mixing.engine.end(RestoreState.DONE)
    mixing.coordinator.tick()
    mixing.coordinator.tick()
    assert len(mixing.forward.passes) == 1
    assert mixing.coordinator.may_be_admitted("a")
    mixing.assert_clean()


def test_first_layers_that_take_too_long_each_time_are_recomputed_no_more() -> None:
    """Though the other layers come in time, and the job ends well."""
    gate = recomputing_gate(2)
    for name in range(30):
        mixing = World(gate)
        prompt = tokens(name, 6)
        mixing.store(prompt)
        mixing.queue("a", prompt)
        mixing.coordinator.tick()
        if not mixing.coordinator.running.is_recomputing:
            break
        (job,) = mixing.engine.jobs
        decision = next(iter(mixing.coordinator.running)).decision
        assert decision is not None
        job.deadline_s, job.started, job.seconds = 0.0, time.monotonic() - 100, decision.others_s
        mixing.engine.end(RestoreState.DONE)
        for _ in range(2):
            mixing.coordinator.tick()
        assert mixing.counters["restore.late"] == 1
    assert name < 10


def test_the_oldest_restore_is_recomputed_first() -> None:
    mixing = World(recomputing_gate(1))
    for name in (1, 2):
        mixing.store(tokens(name, 4))
        mixing.queue(str(name), tokens(name, 4))
    for _ in range(4):
        mixing.coordinator.tick()
    assert [start for start, _, _ in mixing.forward.passes] == [0, 128, 0, 128]


def test_a_restore_gets_as_long_as_recomputing_would_take(mixing: World) -> None:
    mixing.store(tokens(1, 32))
    mixing.queue("a", tokens(1, 32))
    mixing.coordinator.tick()
    recompute_s = 3 * 0.5e-4 * 32 * CHUNK_TOKENS
    assert mixing.engine.jobs[0].deadline_s == pytest.approx(1.5 * recompute_s)


def no_stamp() -> None:
    """Nothing is projected here."""


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("num_waiting", [0, 1, 2])
def test_a_restore_yields_to_requests_that_run_unless_another_one_waits_for_it(
    is_running: bool, num_waiting: int
) -> None:
    pace = Pace(no_stamp)  # type: ignore[arg-type]
    world = World(gate_for(1.0, may_recompute=False), pace=pace)
    world.scheduler.running = is_running
    for index in range(num_waiting):
        prompt = tokens(index, 3)
        world.store(prompt)
        world.queue(str(index), prompt)
    world.queue("nothing is stored of it", tokens(9, 3))
    pace.turn(not is_running)
    assert world.coordinator.waiting.num_restoring == num_waiting
    world.keep_pace()
    yields = is_running and num_waiting < 2
    assert pace.yields is yields
    expected = Load(LOADED.computing, 5.0) if yields else LOADED if is_running else IDLE
    assert world.maker._load() == expected


PROJECT_S = 1e-3
"""Of a token in a layer: ten times as long as to read it."""


@pytest.mark.parametrize(
    ("turns", "method", "project_s", "yields", "teaches"),
    [
        (0, Method.HIDDEN, PROJECT_S, False, True),
        (1, Method.HIDDEN, PROJECT_S, False, False),
        (2, Method.HIDDEN, PROJECT_S, False, False),
        (1, Method.HIDDEN, PROJECT_S, True, False),
        (1, Method.HIDDEN, 0.0, False, False),  # it may have been slowed down until projections decided
        (1, Method.HIDDEN, 0.0, True, True),  # reads decided at its slowest
        (1, Method.KV, 0.0, False, True),  # nothing is projected
    ],
)
def test_a_restore_whose_share_of_the_device_changed_teaches_nothing(
    turns: int, method: Method, project_s: float, yields: bool, teaches: bool
) -> None:
    """It took what was not predicted, for a reason that is known."""
    pace, learnt = Pace(no_stamp), []  # type: ignore[arg-type]
    layout = StateLayout((method,) * LAYERS, (1,) * LAYERS)
    gate = gate_for(10.0, may_recompute=False, methods=layout.methods, project_s=project_s)
    gate.restored = lambda decision, seconds, *_, **__: learnt.append(decision)  # type: ignore[method-assign]
    world = World(gate, pace=pace, layout=layout)
    world.scheduler.running = yields
    pace.turn(yields)
    world.store(tokens(1, 3))
    world.queue("a", tokens(1, 3))
    world.coordinator.tick()
    for _ in range(turns):
        world.scheduler.running = not world.scheduler.running
        world.keep_pace()
    world.engine.end(RestoreState.FAILED, late_after_s=100.0)
    world.coordinator.tick()
    assert len(learnt) == (1 if teaches else 0)


# -- what restores are worth ---------------------------------------------------------------------


def gains(world: World) -> set[str]:
    """What was reported of them."""
    return {name for name in world.counters.measures() if "saved" in name or "lost" in name}


@pytest.mark.parametrize(("late_s", "saved_s"), [(0.0, 9.0), (20.0, -11.0)])
def test_what_a_restore_saves_or_costs(late_s: float, saved_s: float) -> None:
    """Recomputing 4 chunks is predicted to take about 10 s."""
    world = World(gate_for(10.0 / (LAYERS * 4 * CHUNK_TOKENS), may_recompute=False))
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.coordinator.tick()
    world.engine.jobs[0].submitted -= late_s + 1.0
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    assert not gains(world), "while nobody runs with it"
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    name = "restore.saved_seconds" if saved_s > 0 else "restore.lost_seconds_slower"
    measures = world.counters.measures()
    assert measures[name]["count"] == 1
    assert measures[name]["sum"] == pytest.approx(abs(saved_s), abs=0.9)
    assert gains(world) == {name}
    assert measures["restore.prediction_ratio_host"]["count"] == 1


def test_what_restores_without_a_result_cost() -> None:
    world = World(gate_for(1.0, may_recompute=False))
    for number, state in enumerate((RestoreState.FAILED, RestoreState.CANCELLED, RestoreState.DONE)):
        world.store(tokens(number, 4))
        world.queue("a", tokens(number, 4))
        world.coordinator.tick()
        world.engine.jobs[0].submitted -= 3.0
        if state is not RestoreState.FAILED:  # its request has left
            world.coordinator.drop("a")
        world.engine.end(state)
        world.coordinator.tick()
        world.coordinator.admitted("a", 0)
        world.scheduler.line.clear()
    measures = world.counters.measures()
    for reason in ("failed", "cancelled", "unused"):
        assert measures[f"restore.lost_seconds_{reason}"]["sum"] == pytest.approx(3.0, abs=0.9)
    assert "restore.saved_seconds" not in measures


@pytest.mark.parametrize("leaves_by", ["admission", "abort", "update", "switch off"])
def test_what_is_evicted_before_its_request_runs_saved_nothing(leaves_by: str) -> None:
    """However often it is restored, and whatever becomes of the request."""
    world = World(gate_for(1.0, may_recompute=False))
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    for attempt in (1, 2):
        world.restore()
        assert len(gains(world)) == attempt - 1, "reported when the next one begins"
        assert world.coordinator.give_back()
        world.tree.evict_all()
        assert world.coordinator.may_be_admitted("a") == (attempt == 2)
    if leaves_by == "admission":
        world.coordinator.admitted("a", 0)
    else:
        world.end_wait("a", leaves_by)
    if leaves_by == "switch off":
        world.coordinator.admitted("a", 0)
    assert gains(world) == {"restore.lost_seconds_unused"}
    assert world.counters.measures()["restore.lost_seconds_unused"]["count"] == 2


def test_who_waits_for_its_second_restore_when_the_tier_is_switched_off_gained_nothing() -> None:
    world = World(gate_for(1.0, may_recompute=False))
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    assert world.coordinator.give_back()
    world.tree.evict_all()
    assert not world.coordinator.may_be_admitted("a")
    world.coordinator.stop()
    assert gains(world) == {"restore.lost_seconds_unused"}


def test_a_pin_that_is_given_back_may_be_of_use_still() -> None:
    world = World(gate_for(1.0, may_recompute=False))
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    assert world.coordinator.give_back()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    assert gains(world) == {"restore.saved_seconds"}


def ticket_of(world: World, **more: Any) -> Ticket:
    return Ticket(Prompt("a", array("q"), None), [], world.coordinator.waiting.clock, world.counters, **more)


def test_nothing_is_left_to_try_after_the_last_attempt(world: World) -> None:
    """Not even what host memory has of it."""
    ticket = ticket_of(world, head=1, attempts=2, phase=Phase.RUNNING)
    ticket.fall_back()
    assert (ticket.phase, ticket.is_given_up) == (Phase.RESOLVED, True)


def test_what_is_given_back_has_no_slots_any_more(world: World) -> None:
    """For those behind in the queue its request needs them again."""
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    ticket = world.coordinator.waiting.get("a")
    assert ticket is not None
    assert ticket.restored == 4 * CHUNK_TOKENS
    assert world.coordinator.give_back()
    assert ticket.restored == 0


def test_without_predictions_nothing_is_saved_or_lost(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    assert not gains(world)


def test_how_long_requests_wait_in_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    ranks = Alone()
    monkeypatch.setattr(ranks, "now", lambda: now)
    world = World(ranks=ranks)
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    now = 40.0
    world.coordinator.tick()
    now = 42.0
    world.engine.end(RestoreState.DONE)
    world.coordinator.tick()
    now = 45.0
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    waits = {name: measure for name, measure in world.counters.measures().items() if name.startswith("wait")}
    assert waits == {
        "wait.pending_seconds": {"count": 1, "sum": 40.0},
        "wait.running_seconds": {"count": 1, "sum": 2.0},
        "wait.pinned_seconds": {"count": 1, "sum": 3.0},
    }


def test_who_leaves_the_queue_has_waited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    ranks = Alone()
    monkeypatch.setattr(ranks, "now", lambda: now)
    world = World(ranks=ranks)
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    now = 7.0
    world.coordinator.drop("a")
    assert world.counters.measures()["wait.pending_seconds"] == {"count": 1, "sum": 7.0}


def test_what_is_known_of_a_miss(world: World) -> None:
    prompt = tokens(1, 4)
    world.store(prompt)
    for name in range(2, 18):  # 64 slots in all
        world.store(tokens(name, 4))
    keys = chunk_keys(ROOT, prompt)
    assert [key in world.tiers for key in keys] == [False] * 4
    world.queue("gone", prompt)
    world.queue("new", tokens(99, 4))
    assert (world.counters["lookup.missed_evicted"], world.counters["lookup.missed_new"]) == (1, 1)
    world.queue("goes on", [*tokens(17, 4), *tokens(98, 2)])
    world.coordinator.tick()
    world.coordinator.tick()
    assert (world.counters["lookup.missed_evicted"], world.counters["lookup.missed_new"]) == (1, 2)
    world.queue("whole", tokens(16, 4))
    world.coordinator.tick()
    assert world.counters["lookup.missed_new"] == 2
    assert world.counters["lookup.misses"] == 2


def test_who_shares_a_restore_misses_what_no_tier_has_too(world: World) -> None:
    """Once each, though the first one has computed it before the second looks again."""
    prompt = [*tokens(1, 4), *tokens(2, 2)]
    world.store(prompt[: 4 * CHUNK_TOKENS])
    world.queue("a", prompt)
    world.queue("b", prompt)
    world.coordinator.tick()
    world.engine.end(RestoreState.DONE)
    world.coordinator.reap()
    world.coordinator.admitted("a", 4 * CHUNK_TOKENS)
    world.tree.compute(prompt)
    world.coordinator.tick()
    assert world.coordinator.may_be_admitted("b")
    assert world.counters["lookup.missed_new"] == 2


def test_what_left_the_device_and_all_tiers_is_missed(world: World) -> None:
    world.store(tokens(1, 4))
    world.queue("a", tokens(1, 4))
    world.restore()
    assert world.coordinator.give_back()
    world.tree.evict_all()
    world.tiers.clear()
    for _ in range(2):
        assert world.coordinator.may_be_admitted("a")
        world.tree.evictions += 1
    assert world.counters["lookup.missed_new"] == 1
    assert world.counters["lookup.misses"] == 0
