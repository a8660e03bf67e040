"""What the disk tier says of whose its namespaces are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.serving import owners
from sglang_hcache.sglang_plugin.serving.owners import Owners
from sglang_hcache.store import DiskStore
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.testing.stored_chunks import make_run, payload_of, small_config
from tests.unit.plugin.serving.test_weights_in_use import PREFIX, Served

WEIGHTS = bytes(range(32))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore.open(small_config(tmp_path), Counters())
    yield store
    store.close()


def owners_of(disk: DiskStore) -> Owners:
    return Owners(SimpleNamespace(disk=disk), "llama")  # type: ignore[arg-type]


def told(disk: DiskStore, namespace: Namespace) -> object:
    return disk.namespaces.get(namespace.namespace_id().hex())


def test_a_tenant_is_told_by_a_few_digits_only(disk: DiskStore) -> None:
    tenant = "alice@example.org"
    nobodys, hers = Namespace(WEIGHTS, "l"), Namespace(WEIGHTS, "l", tenant, b"\xab" * 32)
    notes = owners_of(disk)
    notes.note(nobodys)
    notes.note(hers)
    assert told(disk, nobodys) == {"model": "llama", "weights": "00010203"}
    digits = hashlib.sha256(tenant.encode()).hexdigest()[:8]
    assert told(disk, hers) == {
        "model": "llama", "weights": "00010203", "tenant": digits, "adapter": "abababab"
    }  # fmt: skip
    assert "alice" not in json.dumps(disk.namespaces.all())
    assert notes._known == {nobodys.namespace_id(), hers.namespace_id()}, "nor are tenants kept in memory"


def test_who_is_used_still_is_not_forgotten_for_those_who_came_later(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_hcache.store.notes._MOST", 4)
    monkeypatch.setattr(owners, "_MOST_KNOWN", 3)
    notes, nobodys = owners_of(disk), Namespace(WEIGHTS, "l")
    for number in range(20):
        notes.note(nobodys)
        notes.note(Namespace(WEIGHTS, "l", str(number)))
    assert told(disk, nobodys)
    assert not told(disk, Namespace(WEIGHTS, "l", "0"))
    assert len(disk.namespaces.all()) == 4


def test_the_store_says_whose_it_is_after_a_restart(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    store = DiskStore.open(config, Counters())
    served = Served(disk=store)
    served.bridge.begin_capture("r", None, PREFIX)
    namespace = served.bridge.weights.namespace
    assert namespace is not None
    run = make_run([bytes(32)], (4096,))
    run = type(run)(namespace.namespace_id(), run.keys, 0, run.chunk_layer_bytes)
    store.write_run(run, payload_of(run))
    served.bridge.close()
    with StoreView.open(config.dirs) as view:
        [found] = view.namespaces()
        assert found.owner["model"] == "a-model"
