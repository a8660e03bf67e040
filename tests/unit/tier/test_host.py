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


def put(tier: HostTier, name: int) -> int:
    slot = tier.reserve()
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
        assert tier.layer_of(1, layer, 3).tolist() == [2] * size + [3] * size + [4] * size


def test_slots_are_freed_together_and_taken_in_order() -> None:
    tier = host(128)
    for name in range(128):
        put(tier, name)
    assert [put(tier, 128 + number) for number in range(4)] == [0, 1, 2, 3]
    assert tier.counts() == (0, 128, 0)
    tier.touch([info(name).key for name in range(10)])  # no more there: 0 to 3
    put(tier, 140)
    assert tier.counts() == (1, 127, 0)  # two go at a time, the oldest that nobody used again: 10 and 11
    assert [info(name).key in tier for name in (4, 9, 10, 11, 12)] == [True, True, False, False, True]
