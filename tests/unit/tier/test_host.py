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


def host(slots: int, *, keep_dirty: bool = False) -> HostTier:
    memory = np.zeros(slots * LAYOUT.chunk_bytes, np.uint8)
    return HostTier(memory, LAYOUT, Counters(), keep_dirty=keep_dirty)


def put(tier: HostTier, name: int, behind: int | None = None) -> int:
    slot = tier.reserve(behind)
    assert slot is not None
    for layer in range(LAYOUT.num_layers):
        tier.layer_of(slot, layer)[:] = name % 256
    assert tier.seal(slot, info(name), on_disk=False)
    return slot


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


def test_what_has_gone_was_used_no_later_than_is_said() -> None:
    """Though chunks that had to be written again go in the order of that."""
    tier = host(2)
    for name in (1, 2):
        put(tier, name)
    tier.mark_dirty([info(2).key, info(1).key])
    tier.give_up_dirty()
    for name in (3, 4):
        put(tier, name)
    assert tier.gone_use == 2


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


def test_what_turns_dirty_while_a_late_disk_is_looked_through_is_written() -> None:
    tier = host(1)
    put(tier, 1)
    tier.disk_opened(lambda key: tier.mark_dirty([key]) is None)
    assert tier.oldest_dirty(1) == [info(1)]


def test_what_goes_while_a_late_disk_is_looked_through_need_not_be_written() -> None:
    tier = host(1)
    put(tier, 1)
    tier.disk_opened(lambda _key: tier.reserve() is None)
    assert tier.oldest_dirty(1) == []


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


def full(slots: int) -> HostTier:
    """One prefix, whose names are its slots; its request has ended."""
    tier = host(slots)
    for name in range(slots):
        assert put(tier, name, name - 1 if name else None) == name
    tier.touch([info(name).key for name in range(slots)], is_reuse=False)
    return tier


def test_where_there_are_many_several_go_at_a_time_and_their_slots_are_taken_in_order() -> None:
    tier = full(8)
    assert [put(tier, 10 + number) for number in range(3)] == [7, 6, 5]
    assert tier.counts() == (0, 8, 0)
    tier = full(256)
    slots = [put(tier, 300)]
    assert tier.counts() == (3, 253, 0)
    for name in range(301, 308):
        slots.append(put(tier, name, slots[-1]))
    assert slots == [*range(252, 256), *range(248, 252)]
    tier.touch([info(name).key for name in range(240, 248)])
    put(tier, 400)
    assert [info(name).key in tier for name in (235, 236, 239, 240)] == [True, False, False, True]


def test_a_slot_behind_that_becomes_free_just_now_is_taken() -> None:
    tier = full(256)
    assert put(tier, 300, 253) == 254


def test_what_was_forgotten_is_filled_in_order() -> None:
    tier = full(8)
    tier.forget_all()
    assert [put(tier, 10 + number) for number in range(8)] == list(range(8))


def test_what_is_pinned_stays_and_the_rest_is_used() -> None:
    tier = full(16)
    for name in range(0, 16, 4):
        assert tier.pin(info(name).key) == name
    taken = {tier.reserve() for _ in range(12)}
    assert taken == {slot for slot in range(16) if slot % 4}
    assert tier.reserve() is None
    assert tier.slot_of(info(4).key) == 4
    assert tier.slot_of(info(5).key) is None
