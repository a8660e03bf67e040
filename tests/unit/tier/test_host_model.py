"""The host tier against a model of it: which chunks it has, in which order they go, and whose each slot is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier

LAYOUT = StateLayout((Method.HIDDEN,) * 2, (8,) * 2)
NAMES = st.integers(0, 3)
PREFIXES = st.lists(NAMES, unique=True, min_size=1, max_size=4)


def key(name: int) -> bytes:
    return name.to_bytes(32, "little")


class HostModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[int, int]] = []
        """Open slots, and how often everything had been forgotten when they were taken."""
        self.pins: list[tuple[int, int]] = []
        """(name, slot) of each pin."""
        self.slots: dict[int, int] = {}
        self.reused: set[int] = set()
        self.used: list[int] = []
        self.written: list[int] = []
        """Both clean; the latter was dirty when it was used last."""
        self.dirty: list[int] = []
        """All least recently used first."""
        self.writable: set[int] = set()
        """What was sealed, and is not clean for good."""
        self.uses = 0
        self.last_use: dict[int, int] = {}
        self.generation = 0
        self.marks = 0
        self.contents: dict[int, int] = {}
        """Of slots that a reader may rely on."""

    @initialize(
        slots=st.sampled_from([1, 2, 4, 7, 8]),
        keep_dirty=st.booleans(),
        at_once=st.integers(1, 3),
    )
    def begin(self, slots: int, keep_dirty: bool, at_once: int) -> None:
        memory = np.zeros(slots * LAYOUT.chunk_bytes, np.uint8)
        self.tier = HostTier(memory, LAYOUT, Counters(), keep_dirty=keep_dirty)
        self.tier._evicted_at_once = at_once
        self.keep_dirty, self.at_once, self.num_slots = keep_dirty, at_once, slots

    # -- what the tier is asked to do ------------------------------------------------------------

    @rule(behind=st.none() | st.integers(0, 7))
    def reserve(self, behind: int | None) -> None:
        slot = self.tier.reserve(behind)
        if not self.free():
            self.evict()
        if behind is not None and behind + 1 in self.free():
            assert slot == behind + 1
        else:
            assert slot in (self.free() or [None])
        if slot is not None:
            self.marks = (self.marks + 1) % 256
            self.tier.memory.reshape(LAYOUT.num_layers, self.num_slots, -1)[:, slot] = self.marks
            self.contents[slot] = self.marks
            self.opened.append((slot, self.generation))

    def evict(self) -> None:
        pinned = self.pinned()
        for name in [name for name in self.clean if name not in pinned][: self.at_once]:
            self.leave(name)
            self.reused.discard(name)
            self.writable.discard(name)
            del self.slots[name]
            assert self.tier.gone_use >= self.last_use[name]

    @precondition(lambda self: self.opened)
    @rule()
    def release(self) -> None:
        self.tier.release(self.opened.pop()[0])

    @precondition(lambda self: self.opened)
    @rule(name=NAMES, on_disk=st.booleans())
    def seal(self, name: int, on_disk: bool) -> None:
        slot, _ = self.opened.pop()
        info = ChunkInfo(key(name), bytes(32), 0, bytes(16))
        is_new = name not in self.slots
        assert self.tier.seal(slot, info, on_disk=on_disk) == is_new
        if is_new:
            self.writable.add(name)
        self.enter(name, slot, self.dirty if self.keep_dirty and not on_disk else self.used)

    @precondition(lambda self: self.opened)
    @rule(name=NAMES)
    def publish(self, name: int) -> None:
        slot, generation = self.opened.pop()
        may = generation == self.generation
        assert self.tier.publish(slot, key(name), generation) == (may and name not in self.slots)
        if may:
            self.enter(name, slot, self.used)

    def enter(self, name: int, slot: int, order: list[int]) -> None:
        if name in self.slots:
            self.reused.add(name)
            self.use(name)
        else:
            self.slots[name] = slot
            order.append(name)
            self.use(name)

    @rule(names=PREFIXES)
    def touch(self, names: list[int]) -> None:
        self.tier.touch([key(name) for name in names])
        self.reused |= {name for name in names if name in self.slots}
        self.use_all(names)

    @rule(names=PREFIXES)
    def settle(self, names: list[int]) -> None:
        self.tier.touch([key(name) for name in names], is_reuse=False)
        self.use_all(names)

    def use_all(self, names: list[int]) -> None:
        for name in reversed(names):
            if name in self.slots:
                self.use(name)

    def use(self, name: int) -> None:
        order = self.dirty if name in self.dirty else self.used
        self.leave(name)
        order.append(name)
        self.uses += 1
        self.last_use[name] = self.uses

    def leave(self, name: int) -> None:
        next(order for order in (self.used, self.written, self.dirty) if name in order).remove(name)

    @property
    def clean(self) -> list[int]:
        """In the order in which they go."""
        used, written, merged = list(self.used), list(self.written), list[int]()
        while used and written:
            merged.append((used if self.last_use[used[0]] < self.last_use[written[0]] else written).pop(0))
        return merged + used + written

    @rule(name=NAMES)
    def pin(self, name: int) -> None:
        slot = self.tier.pin(key(name))
        assert slot == self.slots.get(name)
        if slot is not None:
            self.pins.append((name, slot))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        name, slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tier.unpin(key(name), slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def mark_clean(self, data: Any) -> None:
        name, slot = data.draw(st.sampled_from(self.pins))
        self.tier.mark_clean(key(name), slot)
        if self.slots.get(name) == slot and name in self.dirty:
            self.dirty.remove(name)
            self.written.append(name)

    @rule(names=PREFIXES)
    def mark_dirty(self, names: list[int]) -> None:
        self.tier.mark_dirty([key(name) for name in names])
        for name in names:
            if name in self.clean and name in self.writable:
                self.leave(name)
                self.dirty.append(name)

    @rule()
    def give_up_dirty(self) -> None:
        self.tier.give_up_dirty()
        self.written += self.dirty
        self.dirty.clear()
        self.writable.clear()

    @rule(names=PREFIXES, pinned=st.booleans())
    def put(self, names: list[int], pinned: bool) -> None:
        """What takes several steps, for they seldom come in a row by chance."""
        for name in names:
            self.reserve(behind=None)
            if self.opened:
                self.seal(name, on_disk=False)
            if pinned:
                self.pin(name)

    @rule(names=PREFIXES)
    def forget_and_put_again(self, names: list[int]) -> None:
        self.forget_all()
        self.put(names, pinned=False)

    @rule()
    def forget_all(self) -> None:
        self.tier.forget_all()
        self.slots, self.reused, self.writable = {}, set(), set()
        self.used, self.written, self.dirty = [], [], []
        self.generation += 1

    # -- what must be so -------------------------------------------------------------------------

    def free(self) -> list[int]:
        used = {*self.slots.values(), *(slot for slot, _ in self.opened), *(slot for _, slot in self.pins)}
        return sorted(set(range(self.num_slots)) - used)

    def pinned(self) -> set[int]:
        return {name for name, slot in self.pins if self.slots.get(name) == slot}

    @invariant()
    def counts(self) -> None:
        free, pinned = len(self.free()), self.pinned()
        assert self.tier.counts() == (free, len(self.clean), len(self.dirty))
        clean, dirty = ([name for name in names if name not in pinned] for names in (self.clean, self.dirty))
        assert self.tier.counts(pinned=False) == (free, len(clean), len(dirty))
        assert [info.key for info in self.tier.oldest_dirty(10, pinned=False)] == [
            key(name) for name in dirty
        ]

    @invariant()
    def orders(self) -> None:
        assert [info.key for info in self.tier.oldest_dirty(10)] == [key(name) for name in self.dirty]
        assert [name for name, _ in self.tier._oldest_clean()] == [key(name) for name in self.clean]
        self.each(lambda name: (key(name) in self.tier) == (name in self.slots))
        self.each(lambda name: self.tier.is_reused(key(name)) == (name in self.reused))
        self.each(lambda name: (self.tier.dirty_info(key(name)) is not None) == (name in self.dirty))

    @invariant()
    def nobody_writes_to_what_is_held(self) -> None:
        for slot in {*self.slots.values(), *(slot for _, slot in self.pins)}:
            for layer in range(LAYOUT.num_layers):
                assert (self.tier.layer_of(slot, layer) == self.contents[slot]).all()

    def each(self, holds: Callable[[int], bool]) -> None:
        assert all(holds(name) for name in range(4))

    def teardown(self) -> None:
        """Every slot comes back."""
        if hasattr(self, "tier"):
            self.forget_all()
            while self.opened:
                self.release()
            for name, slot in self.pins:
                self.tier.unpin(key(name), slot)
            assert self.tier.counts() == (self.num_slots, 0, 0)


TestHostModel = HostModel.TestCase
