"""Whose KV is on the device: behind that of earlier weights nothing is saved, behind that of the present ones all."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hcache.core.config import HCacheConfig, WritePolicy
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import Method, PlanKind, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.sglang_plugin.seam.budget import HostBudget
from sglang_hcache.sglang_plugin.seam.protocols import Prompt
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.store import DiskStore
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

PREFIX = array("q", range(70))
LAYOUT = StateLayout((Method.HIDDEN,) * 2, (4, 4))


class Served:
    """A bridge without a server, and the weights behind it.

    Args:
        pool: K and V of each layer.
        rows: of the staging ring.
        disk: closed with the bridge.
        config: of the tier.
    """

    def __init__(
        self,
        layout: StateLayout = LAYOUT,
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]] = 2 * ((torch.zeros(1, 1, 1),) * 2,),
        rows: int = 128,
        slots: int = 8,
        disk: DiskStore | None = None,
        config: HCacheConfig | None = None,
    ) -> None:
        self.weights = "a"
        self.watched: list[int] = []
        model: Any = SimpleNamespace(
            row_dtype=torch.float32,
            shape=SimpleNamespace(name="a-model"),
            attention=(),
            watch=lambda layers, _on_layer: self.watched.extend(layers),
            weights=lambda: self.weights,
            namespace=lambda _layout, weights: Namespace(b"model", weights),
        )
        device: Any = SimpleNamespace(
            is_cpu=True,
            adapters=None,
            drops_thoughts=False,
            largest_pass=512,
            pass_rows=512,
            gpu=None,
            host_memory=host_buffer,
            pool=SimpleNamespace(buffers=pool.__getitem__),
            tree=None,
            scheduler=None,
            ranks=Alone(),
        )
        counters, has_disk = Counters(), disk is not None
        host = HostTier(np.zeros(slots * layout.chunk_bytes, np.uint8), layout, counters, keep_dirty=has_disk)
        tiers = TieredStore(host, disk, counters, write_policy=WritePolicy.WRITE_BACK, run_chunks=1)
        restorer = LayerRestorer(torch.float32, device.pool, 1, None)
        namespace, budget = Namespace(b"model", "a"), HostBudget(rows, slots, 1)
        config = config or HCacheConfig()
        self.bridge = Bridge(config, model, namespace, tiers, budget, device, restorer, None, counters)

    def update(self, weights: str) -> None:
        """SGLang with ``flush_cache=False``."""
        self.bridge.weights_will_change()
        self.weights = weights

    def serve(self) -> None:
        self.bridge.kv_arrives()

    def saves_behind_the_device(self) -> bool:
        self.bridge.begin_capture("r", None, PREFIX)
        is_saved = "r" in self.bridge.saving.captured
        self.bridge.saving.end("r")
        return is_saved


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.bridge.close()


def test_weights_wait_for_the_pass_that_a_device_still_computes(served: Served) -> None:
    """Its rows are saved as what the old ones make of it."""
    waited: list[bool] = []
    mark = SimpleNamespace(wait=lambda: waited.append(True))
    served.bridge._gpu = SimpleNamespace(stage=SimpleNamespace(fence=lambda: mark))  # type: ignore[assignment]
    served.bridge.weights_will_change()
    assert waited


def test_a_bridge_begins_with_an_empty_device(served: Served) -> None:
    served.update("b")
    served.serve()
    assert served.saves_behind_the_device()


def test_an_empty_device_is_of_any_weights(served: Served) -> None:
    served.serve()
    served.bridge.device_reset()
    served.update("b")
    served.serve()
    assert served.saves_behind_the_device()


@pytest.mark.parametrize("flushed", [False, True])
def test_behind_kv_of_earlier_weights_nothing_is_saved(served: Served, flushed: bool) -> None:
    if flushed:
        served.serve()
        served.bridge.device_reset()
    served.serve()
    served.update("b")
    assert not served.saves_behind_the_device()
    served.serve()  # now there is KV of both
    assert not served.saves_behind_the_device()
    assert served.bridge.state()["nothing_saved"] == "old_weights"
    served.update("b")
    assert not served.saves_behind_the_device()
    served.update("a")
    assert not served.saves_behind_the_device()
    served.bridge.device_reset()
    served.serve()
    assert served.saves_behind_the_device()
    assert served.bridge.state()["nothing_saved"] is None


def test_the_same_weights_may_come_back(served: Served) -> None:
    served.serve()
    served.update("a")
    assert served.saves_behind_the_device()


def test_weights_that_nobody_used_leave_nothing(served: Served) -> None:
    served.update("b")
    served.bridge.begin_capture("r", None, array("q"))  # they are read
    served.update("c")
    served.serve()
    assert served.saves_behind_the_device()


@pytest.mark.parametrize("method", [PlanKind.KV, PlanKind.RECOMPUTE])
def test_weights_are_read_only_where_something_is_stored(method: PlanKind) -> None:
    served = Served(config=HCacheConfig(method=method))
    served.update("b")
    served.serve()
    assert (served.bridge.weights.namespace is None) == (method is PlanKind.RECOMPUTE)
    served.bridge.close()


def test_requests_that_come_while_the_weights_are_away_are_looked_up_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To name their chunks the weights would be read: memory that SGLang has lent."""
    queued: list[tuple[str, bytes]] = []

    def queue(prompt: Prompt, keys: list[bytes]) -> None:
        queued.append((prompt.rid, keys[0]))

    monkeypatch.setattr(served.bridge.restores, "queue", queue)
    monkeypatch.setattr(served.bridge, "_idling", SimpleNamespace(pause=lambda: None))
    served.bridge.queue(Prompt("before", PREFIX, None))
    served.update("b")
    for rid in ("one", "aborted", "two"):
        served.bridge.queue(Prompt(rid, PREFIX, None))
    waiting = [SimpleNamespace(rid=rid) for rid in ("one", "two")]
    monkeypatch.setattr(served.bridge.restores, "scheduler", SimpleNamespace(waiting=lambda: waiting))
    assert [rid for rid, _ in queued] == ["before"]
    assert served.bridge.weights.namespace is None
    served.bridge.tick()
    served.bridge.queue(Prompt("three", PREFIX, None))
    assert [rid for rid, _ in queued] == ["before", "one", "two", "three"]
    assert [key == queued[0][1] for _, key in queued] == [True, False, False, False]


def test_weights_that_are_away_are_not_read_for_requests_that_were_aborted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.bridge, "_idling", SimpleNamespace(pause=lambda: None))
    served.update("b")
    served.bridge.queue(Prompt("aborted", PREFIX, None))
    monkeypatch.setattr(served.bridge.restores, "scheduler", SimpleNamespace(waiting=list))
    served.bridge.tick()
    assert served.bridge.weights.namespace is None
    assert not served.bridge._unnamed


def test_what_is_restored_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import HCacheRadixCache

    told: list[str] = []
    cache: Any = object.__new__(HCacheRadixCache)
    cache._bridge = SimpleNamespace(kv_arrives=lambda: told.append("arrives"))
    result = SimpleNamespace(prefix_len=0, last_device_node=None)
    monkeypatch.setattr(RadixCache, "insert", lambda *_: told.append("inserted") or result)
    cache.insert_tokens(array("q", [1]), None, torch.zeros(1, dtype=torch.int64))
    assert told == ["arrives", "inserted"]


def test_a_tier_that_is_switched_off_saves_nothing(served: Served) -> None:
    """Of requests that run neither, and nobody is cut to whole chunks for what would be saved."""
    bridge, stopped = served.bridge, []
    bridge.restores.stop = lambda: stopped.append(True)  # type: ignore[method-assign]
    bridge.begin_capture("runs", None, PREFIX)
    assert not bridge.may_begin_at("runs", None, 65, PREFIX[:1])
    bridge.switch(on=False)
    assert (stopped, bridge.saving.captured, bridge.state()["nothing_saved"]) == (
        [True],
        set(),
        "switched_off",
    )
    assert not served.saves_behind_the_device()
    assert bridge.may_begin_at("runs", None, 65, PREFIX[:1])
    bridge.queue(Prompt("waits", PREFIX, None))
    assert not bridge.restores.waiting
    bridge.switch(on=True)
    assert served.saves_behind_the_device()
    assert bridge.state()["nothing_saved"] is None
    assert len(stopped) == 1


def test_weights_that_come_while_it_is_off_are_not_missed(served: Served) -> None:
    served.bridge.restores.stop = lambda: None  # type: ignore[method-assign]
    served.bridge.switch(on=False)
    served.serve()
    served.update("b")
    served.bridge.switch(on=True)
    assert not served.saves_behind_the_device(), "KV of the earlier ones is on the device"
