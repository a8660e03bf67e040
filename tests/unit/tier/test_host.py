from __future__ import annotations

import numpy as np
import pytest

from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier

LAYOUT = StateLayout((Method.HIDDEN,) * 2, (8,) * 2)


def info(name: int) -> ChunkInfo:
    return ChunkInfo(name.to_bytes(32, "little"), bytes(32), 0, bytes(16))


def host(slots: int, *, keep_dirty: bool = False, group_slots: int = 1) -> HostTier:
    memory = np.zeros(slots * LAYOUT.chunk_bytes, np.uint8)
    return HostTier(memory, LAYOUT, Counters(), keep_dirty=keep_dirty, group_slots=group_slots)


def put(tier: HostTier, name: int, behind: int | None = None) -> int:
    slot = tier.reserve(behind)
    assert slot is not None
    for layer in range(LAYOUT.num_layers):
        tier.layer_of(slot, layer)[:] = name
    assert tier.seal(slot, info(name), on_disk=False)
    return slot


def test_the_least_recently_used_clean_chunk_goes_first() -> None:
    tier = host(3)
    for name in (1, 2, 3):
        put(tier, name)
    tier.touch([info(1).key])
    put(tier, 4)
    assert [info(name).key in tier for name in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_chunk_that_is_written_is_no_younger_for_it() -> None:
    """Or what is used once, and is written when the device drops it, would stay longer than what is used again."""
    tier = host(3, keep_dirty=True)
    for name in (1, 2, 3):
        put(tier, name)
    for name in (2, 1):
        slot = tier.pin(info(name).key)
        assert slot is not None
        tier.mark_clean(info(name).key, slot)
        tier.unpin(info(name).key, slot)
    tier.touch([info(1).key])
    slot = tier.pin(info(3).key)
    assert slot is not None
    tier.mark_clean(info(3).key, slot)
    tier.unpin(info(3).key, slot)
    for name, left, gone_use in ((4, [True, False, True], 2), (5, [True, False, False], 3)):
        put(tier, name)
        assert tier.gone_use == gone_use
        assert [info(old).key in tier for old in (1, 2, 3)] == left


def test_pins_are_counted_by_what_is_pinned() -> None:
    tier = host(4, keep_dirty=True)
    for name in (1, 2, 3):
        put(tier, name)
    slots = [tier.pin(info(name).key) for name in (1, 2)]
    assert slots[0] is not None
    assert tier.counts(pinned=False) == (1, 0, 1)
    tier.mark_clean(info(1).key, slots[0])
    assert tier.counts(pinned=False) == (1, 0, 1)
    tier.unpin(info(1).key, slots[0])
    assert tier.counts(pinned=False) == (1, 1, 1)
    tier.mark_dirty([info(1).key])
    assert tier.counts(pinned=False) == (1, 0, 2)
    tier.give_up_dirty()
    assert tier.counts(pinned=False) == (1, 2, 0)


def test_reading_a_prefix_from_its_head_on_does_not_evict_its_head_first() -> None:
    tier = host(3)
    keys = [info(name).key for name in (1, 2, 3)]
    for name in (1, 2, 3):
        put(tier, name)
    tier.touch(keys)
    for key in keys:
        slot = tier.pin(key)
        assert slot is not None
        tier.unpin(key, slot)
    put(tier, 4)
    assert [key in tier for key in keys] == [True, True, False]


def test_pinned_and_dirty_chunks_stay() -> None:
    tier = host(2, keep_dirty=True)
    put(tier, 1)
    put(tier, 2)
    assert tier.reserve() is None
    slot = tier.pin(info(1).key)
    assert slot is not None
    tier.mark_clean(info(1).key, slot)
    assert tier.reserve() is None
    tier.unpin(info(1).key, slot)
    assert tier.reserve() == slot
    assert info(2).key in tier


def test_a_chunk_made_anew_is_not_clean_because_the_old_one_was_written() -> None:
    tier = host(2, keep_dirty=True)
    put(tier, 1)
    slot = tier.pin(info(1).key)
    assert slot is not None
    tier.forget_all()
    put(tier, 1)
    tier.mark_clean(info(1).key, slot)
    tier.unpin(info(1).key, slot)
    assert tier.counts() == (1, 0, 1)


def test_a_chunk_sealed_twice_is_kept_once() -> None:
    tier = host(2)
    put(tier, 1)
    slot = tier.reserve()
    assert slot is not None
    assert not tier.seal(slot, info(1), on_disk=False)
    assert tier.counts() == (1, 1, 0)


def test_forgetting_leaves_pinned_bytes_in_place_until_the_reader_is_done() -> None:
    tier = host(2)
    slot = put(tier, 1)
    assert tier.pin(info(1).key) == tier.pin(info(1).key) == slot
    tier.forget_all()
    assert info(1).key not in tier
    other = put(tier, 2)
    assert other != slot
    tier.unpin(info(1).key, slot)
    assert tier.counts()[0] == 0
    # The same chunk comes back while an old reader still holds the old slot.
    tier.forget_all()
    again = put(tier, 1)
    assert again != slot
    tier.unpin(info(1).key, slot)
    assert tier.counts() == (1, 1, 0)
    assert tier.pin(info(1).key) == again


def test_reading_a_layer_gathers_slots() -> None:
    tier = host(3)
    slots = [put(tier, name) for name in (1, 2, 3)]
    size = LAYOUT.chunk_layer_bytes[1]
    out = np.zeros((2, size), np.uint8)
    tier.read_layer([slots[2], slots[0]], 1, out)
    assert (out[0] == 3).all()
    assert (out[1] == 1).all()


def test_memory_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold chunks"):
        HostTier(np.zeros(LAYOUT.chunk_bytes + 1, np.uint8), LAYOUT, Counters(), keep_dirty=False)


def test_slots_that_follow_each_other_are_one_piece_of_each_layer() -> None:
    tier = host(4)
    for name in (1, 2, 3, 4):
        put(tier, name)
    for layer, size in enumerate(LAYOUT.chunk_layer_bytes):
        rows = tier.layers(layer, 1)[0]
        assert rows[1:].reshape(-1).tolist() == [2] * size + [3] * size + [4] * size
        assert np.shares_memory(rows[1:].reshape(-1), tier.memory), "no copy"


def full(slots: int, group_slots: int) -> HostTier:
    """One prefix, whose names are its slots."""
    tier = host(slots, group_slots=group_slots)
    for name in range(slots):
        assert put(tier, name, name - 1 if name else None) == name
    return tier


def test_neighbours_are_evicted_together_and_taken_in_order() -> None:
    tier = full(16, 4)
    assert put(tier, 20) == 0  # the oldest, which goes with its neighbours
    assert [info(name).key in tier for name in range(5)] == [False] * 4 + [True]
    assert put(tier, 21, 0) == 1
    assert put(tier, 22, 1) == 2
    assert put(tier, 23, 8) == 4  # what is behind it is taken: a group of its own
    assert tier.counts() == (4, 12, 0)


def test_a_prefix_begins_where_nobody_waits_to_go_on_unless_many_slots_do() -> None:
    tier = host(64, group_slots=4)
    assert [put(tier, name) for name in range(16)] == list(range(0, 64, 4))
    assert all(put(tier, 20 + number) % 4 for number in range(44))
    assert tier.counts().clean == 60
    put(tier, 100)  # as many as one in sixteen are idle: from now on others go
    assert tier.counts().clean < 61


def test_what_is_used_again_and_again_does_not_go_with_what_branched_off() -> None:
    """A prefix of many requests; what each adds is used once."""
    tier = host(64, group_slots=4)
    prefix = [info(name).key for name in range(6)]
    for name in range(6):
        assert put(tier, name, name - 1 if name else None) == name
    for request in range(150):
        tier.touch(prefix)
        put(tier, 100 + request, tier.slot_of(prefix[-1]))
        tier.touch([*prefix, info(100 + request).key], is_over=True)
        assert all(key in tier for key in prefix)


def test_hot_neighbours_leave_no_slot_unused() -> None:
    tier = full(64, 4)
    hot = [info(name).key for name in range(0, 64, 4)]
    for number in range(150):
        tier.touch(hot)
        put(tier, 100 + number)
        assert all(key in tier for key in hot)
        assert tier.counts().free < 4 + 4 * 4  # a sixteenth, and what the last look freed beyond it


def test_without_groups_several_go_at_a_time_where_there_are_many() -> None:
    tier = full(8, 1)
    assert [put(tier, 10 + number) for number in range(3)] == [0, 1, 2]
    assert tier.counts() == (0, 8, 0)
    tier = full(128, 1)
    assert [put(tier, 130 + number) for number in range(4)] == [0, 1, 2, 3]
    tier.touch([info(name).key for name in range(10)])  # no more there: 0 to 3
    put(tier, 140)
    assert tier.counts() == (1, 127, 0)  # two go at a time, the oldest that nobody used again: 10 and 11
    assert [info(name).key in tier for name in (4, 9, 10, 11, 12)] == [True, True, False, False, True]


def test_what_is_pinned_stays_and_the_rest_of_its_group_is_used() -> None:
    tier = full(16, 4)
    for name in range(0, 16, 4):
        assert tier.pin(info(name).key) == name
    taken = {tier.reserve() for _ in range(12)}
    assert taken == {slot for slot in range(16) if slot % 4}
    assert tier.reserve() is None
    assert tier.slot_of(info(4).key) == 4
    assert tier.slot_of(info(5).key) is None
