"""What old weights left is not written to disk any more; anything else is, as before."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hcache.core.keys import ChunkKey, Namespace, chunk_keys
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import small_config
from sglang_hcache.tier.chunk import ChunkInfo
from tests.e2e.harness import wait_for
from tests.unit.plugin.serving.test_weights_in_use import Served

LAYOUT = StateLayout((Method.HIDDEN,), (64,))


class ServedFromDisk(Served):
    def __init__(self, folder: Path) -> None:
        self.disk = DiskStore.open(small_config(folder), Counters())
        super().__init__(LAYOUT, disk=self.disk)

    def save(self, *, weights: str, tenant: str | None = None) -> list[ChunkKey]:
        """Two chunks of a prompt, sealed in host memory."""
        namespace = Namespace(b"model", weights, tenant)
        keys = [namespace.root_key(), *chunk_keys(namespace.root_key(), array("q", range(128)))]
        for index, (parent, key) in enumerate(itertools.pairwise(keys)):
            slot = self.bridge.tiers.reserve()
            assert slot is not None
            self.bridge.tiers.seal(slot, ChunkInfo(key, parent, index, namespace.namespace_id()))
        return keys[1:]

    def written(self) -> int:
        wait_for(lambda: not self.bridge.saving.is_busy, "saving to end")
        return self.bridge.counters["demote.chunks_written"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedFromDisk]:
    made = ServedFromDisk(tmp_path)
    yield made
    made.bridge.close()


def save_later(served: ServedFromDisk) -> threading.Event:
    """A pass of weights "a" whose chunks the assembler seals once the event is set."""
    goes_on = threading.Event()

    def save() -> None:
        goes_on.wait(10)
        served.save(weights="a")

    served.bridge.saving.then(save)
    return goes_on


@pytest.mark.parametrize("is_flushed", [True, False])
def test_nothing_of_old_weights_is_written(served: ServedFromDisk, is_flushed: bool) -> None:
    old = served.save(weights="a") + served.save(weights="a", tenant="somebody")
    served.update("b")
    if is_flushed:
        served.bridge.device_reset()
    assert served.written() == 0
    served.serve()
    assert served.written() == 0
    assert served.bridge.tiers.host.counts() == (4, 4, 0)
    served.bridge.device_reset()
    assert served.written() == 0
    assert all(key in served.bridge.tiers for key in old), "they serve if these weights come back"
    new = served.save(weights="b")
    served.bridge.close()
    assert served.bridge.counters["demote.chunks_written"] == len(new)


def test_what_comes_of_passes_before_the_update_is_old_too(served: ServedFromDisk) -> None:
    """The assembler seals it later."""
    goes_on = save_later(served)
    served.update("b")
    served.bridge.device_reset()
    served.serve()
    goes_on.set()
    assert served.written() == 0
    assert served.bridge.tiers.host.counts() == (6, 2, 0)


def test_in_a_loop_of_updates_nothing_is_written(served: ServedFromDisk) -> None:
    for weights in ("a", "b", "c", "d", "e", "f"):
        served.update(weights)
        served.bridge.device_reset()
        served.serve()
        assert served.written() == 0, "as long as host memory holds what is new"
        served.save(weights=weights)


def test_weights_that_are_the_same_cost_nothing(served: ServedFromDisk) -> None:
    """As when memory is released and taken again, or an update fails."""
    served.save(weights="a")
    served.update("b")
    served.update("a")
    served.bridge.device_reset()
    assert served.written() == 0, "nobody knows yet"
    served.serve()
    assert served.written() == 2
    served.save(weights="a", tenant="somebody")
    served.update("a")
    served.serve()
    assert served.written() == 2, "the device was not reset"


def test_what_weights_that_may_be_old_left_is_written_at_the_end(served: ServedFromDisk) -> None:
    served.save(weights="a")
    served.update("b")
    served.bridge.device_reset()
    served.bridge.close()
    assert served.bridge.counters["demote.chunks_written"] == 2


def test_a_reset_writes_everything(served: ServedFromDisk) -> None:
    served.save(weights="a")
    served.bridge.device_reset()
    assert served.written() == 2


def test_a_reset_writes_what_is_sealed_after_it(served: ServedFromDisk) -> None:
    """Of passes before it, which the assembler is still at."""
    goes_on = save_later(served)
    served.bridge.device_reset()
    wait_for(lambda: not served.bridge.tiers.is_saving, "the demoter")
    goes_on.set()
    assert served.written() == 2
