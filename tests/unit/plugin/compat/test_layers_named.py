"""SGLang's KV pool tells which layer attention reads next."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def test_a_pool_names_a_layer_before_it_is_read() -> None:
    """What passes behind a restore wait by. Our own accesses must not be among them."""
    from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import DevicePool

    named: list[int] = []
    pool = MHATokenToKVPool(128, 64, torch.float32, 2, 8, 3, "cpu", enable_memory_saver=False)
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=named.append))
    ours, slots, rows = DevicePool(pool), torch.tensor([64]), torch.ones(1, 2, 8)
    ours.write(2, slots, rows, rows)
    ours.read(2, slots)
    assert not named
    pool.get_kv_buffer(1)
    pool.get_key_buffer(2)
    pool.get_value_buffer(0)
    assert named == [1, 1, 2, 0]
