"""An error of ours in a forward pass ends the saving of its requests, and never the pass."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.capture.events import RequestRows, RowsCaptured
from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import small_config
from tests.unit.plugin.serving.test_weights_in_use import LAYOUT, Served
from tests.waiting import wait_until

TOKENS = torch.arange(64)


def fail(*_: object, **__: object) -> None:
    raise MemoryError("no memory for rows")


@pytest.mark.parametrize("step", ["begin", "on_layer", "end"])
def test_a_pass_that_cannot_be_saved_goes_on(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()
    bridge: Any = served.bridge
    for rid in ("hit", "other"):
        bridge.begin_capture(rid, None, array("q"))
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(bridge.saving._passes, step, fail)
        run_pass(bridge, "hit")
    assert bridge.counters["capture.errors"] == 1
    assert "cannot be saved" in caplog.text
    assert set(bridge.saving.captured) == {"other"}
    run_pass(bridge, "other")
    assert bridge.counters["capture.errors"] == 1
    bridge.saving.end("other")
    bridge.close()
    assert bridge.counters["host.chunks_sealed"] == 1


def test_requests_begin_anew_after_an_error_where_chunks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge: Any = Served().bridge
    bridge.begin_capture("a long prompt", None, array("q"))
    with monkeypatch.context() as broken:
        broken.setattr(bridge.saving._assembler._requests, "add_pass", fail)
        run_pass(bridge, "a long prompt")
        wait_until(lambda: bridge.counters["capture.errors"] == 1 and not bridge.saving.is_busy)
    bridge.saving.tick()
    assert not bridge.saving.captured, "what it computes next is begun again"
    bridge.begin_capture("a long prompt", None, array("q"))
    bridge.saving.tick()
    run_pass(bridge, "a long prompt")
    bridge.saving.end("a long prompt")
    bridge.close()
    assert bridge.counters["host.chunks_sealed"] == 1


def run_pass(bridge: Any, rid: str, tokens: torch.Tensor = TOKENS) -> None:
    """One from the beginning on, over a whole chunk unless others are named."""
    assert bridge.saving.begin_pass([rid], tokens, tokens)
    hook: Callable[[int, torch.Tensor], None] = bridge.saving._on_layer
    for layer in range(LAYOUT.num_layers):
        hook(layer, torch.zeros(len(tokens), 1))
    bridge.saving.end_pass([RequestRows(rid, 0, 0, len(tokens))], is_typical=True, is_replayed=False)


def test_decoded_rows_that_wait_make_room_for_the_next_piece_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They leave staging, which holds two pieces, while the first one is computed; nothing does between the two."""
    piece, hidden = torch.arange(512), torch.zeros(512, 1)
    bridge: Any = Served(rows=2 * len(piece)).bridge
    requests, goes_on = bridge.saving._assembler._requests, threading.Event()
    add_pass = requests.add_pass
    monkeypatch.setattr(requests, "add_pass", lambda *args: goes_on.wait(60) and add_pass(*args))
    for rid in ("decodes", "a long prompt"):
        bridge.begin_capture(rid, None, array("q"))
    bridge.saving.begin_pass(["decodes"], piece[:1], piece[:1])
    for layer in range(LAYOUT.num_layers):
        bridge.saving._on_layer(layer, hidden[:1])
    bridge.saving.end_pass([RequestRows("decodes", 0, 0, 1)], is_typical=True, is_replayed=False)
    for position in (0, 512):
        bridge.saving.begin_pass(["a long prompt"], piece, piece)
        if not position:
            goes_on.set()
            wait_until(lambda: not bridge.saving.is_busy)
            goes_on.clear()
        for layer in range(LAYOUT.num_layers):
            bridge.saving._on_layer(layer, hidden)
        bridge.saving.end_pass(
            [RequestRows("a long prompt", position, 0, 512)],
            is_typical=True,
            is_replayed=False,
            is_prefill=True,
        )
    goes_on.set()
    bridge.close()
    assert bridge.counters["capture.rows"] == 2 * 512 + 1
    assert bridge.counters["capture.rows_dropped_staging_full"] == 0


@pytest.mark.parametrize(("num_rows", "wakes"), [(100, False), (163, False), (164, True)])
def test_only_a_large_prefill_wakes_who_saves_decoded_rows(num_rows: int, wakes: bool) -> None:
    """However many requests decode."""
    bridge: Any = Served(rows=4096).bridge
    rids = [f"r{number}" for number in range(100)]
    for rid in rids:
        bridge.begin_capture(rid, None, array("q"))
    rows, hidden = torch.arange(num_rows), torch.zeros(num_rows, 1)
    for position in range(2):  # the first time with the beginnings of all of them, which are many events
        bridge.saving.begin_pass(rids, rows[:100], rows[:100])
        for layer in range(LAYOUT.num_layers):
            bridge.saving._on_layer(layer, hidden[:100])
        requests = [RequestRows(rid, position, row, 1) for row, rid in enumerate(rids)]
        bridge.saving.end_pass(requests, is_typical=True, is_replayed=False)
    assert bridge.saving._assembler._held
    bridge.saving.begin_pass(rids, rows, rows)
    assert bool(bridge.saving._assembler._held) != wakes
    bridge.saving.abandon_pass()
    bridge.close()


def test_a_pass_that_fails_by_itself_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge: Any = Served().bridge
    bridge.begin_capture("r", None, array("q"))
    with monkeypatch.context() as broken:
        broken.setattr(bridge.saving._passes, "begin", fail)
        assert bridge.saving.begin_pass(["r"], TOKENS, TOKENS)
    bridge.saving.abandon_pass()
    run_pass(bridge, "r")
    bridge.saving.end("r")
    bridge.close()
    assert bridge.counters["host.chunks_sealed"] == 1


def test_a_stop_does_not_wait_for_a_device_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it brings when all is closed is saved or dropped, as ever."""
    disk = DiskStore.open(small_config(tmp_path), Counters())
    bridge: Any = Served(disk=disk, config=HCacheConfig(shutdown_flush_s=0.2)).bridge
    goes_on, left_s, finish = threading.Event(), list[float](), bridge.last_writes.finish
    bridge.last_writes.finish = lambda limit_s: (left_s.append(limit_s), finish(limit_s))
    hangs: Any = SimpleNamespace(wait=partial(goes_on.wait, 60))
    bridge.saving._assembler.publish(RowsCaptured((), torch.zeros(0, dtype=torch.int64), None, hangs))
    for rid in ("a", "b"):
        bridge.begin_capture(rid, rid, array("q"))
        run_pass(bridge, rid)
    bridge.close()
    assert bridge.counters["host.chunks_sealed"] == 0
    assert "may be lost" in caplog.text
    assert left_s == [0.0], "all of the time is over"
    for _ in range(7):
        assert bridge.tiers.reserve() is not None
    goes_on.set()
    bridge.saving._assembler._thread.join(60)
    assert bridge.counters["host.chunks_sealed"] == 1
    assert bridge.counters["capture.chunks_dropped_host_full"] == 1, "of the second request"
    assert bridge.counters["capture.errors"] == 0


def test_a_clear_is_durable_when_what_was_on_its_way_is_gone_too(tmp_path: Path) -> None:
    bridge: Any = Served(disk=DiskStore.open(small_config(tmp_path), Counters())).bridge
    goes_on = threading.Event()
    hangs: Any = SimpleNamespace(wait=partial(goes_on.wait, 60))
    bridge.saving._assembler.publish(RowsCaptured((), torch.zeros(0, dtype=torch.int64), None, hangs))
    is_durable = bridge.clear()
    wait_until(lambda: not bridge.tiers.is_clearing)
    assert not is_durable(), "what was computed before may be sealed and written still"
    goes_on.set()
    wait_until(is_durable)
    bridge.close()


def test_what_was_on_its_way_is_cleared_with_the_rest() -> None:
    """Whole chunks and the beginning of the next one; what comes later stays."""
    bridge: Any = Served(rows=256).bridge
    goes_on = threading.Event()
    hangs: Any = SimpleNamespace(wait=partial(goes_on.wait, 60))
    root, one, two = bridge.weights.namespace.root_key(), array("q", [1] * 100), array("q", [2] * 100)
    bridge.saving._assembler.publish(RowsCaptured((), torch.zeros(0, dtype=torch.int64), None, hangs))
    for rid, tokens in (("a", one), ("b", two)):
        bridge.begin_capture(rid, None, array("q"))
        run_pass(bridge, rid, torch.tensor(tokens))
        bridge.saving.end(rid)
        if rid == "a":
            bridge.clear()
    goes_on.set()
    wait_until(lambda: not bridge.saving.is_busy)
    for tokens, is_saved in ((one, False), (two, True)):
        (key,) = chunk_keys(root, tokens)
        assert (key in bridge.tiers) == is_saved
        assert bridge.saving.covers(key, tokens[CHUNK_TOKENS:]) == is_saved
    bridge.close()


def test_a_clear_that_failed_is_never_taken_for_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge: Any = Served(disk=DiskStore.open(small_config(tmp_path), Counters())).bridge
    with monkeypatch.context() as broken:
        broken.setattr(bridge.saving._assembler.beginnings, "clear", fail)
        is_durable = bridge.clear()
        wait_until(lambda: not bridge.saving.is_busy)
    assert bridge.counters["capture.errors"] == 1
    assert not bridge.tiers.is_clearing
    assert not is_durable()
    wait_until(bridge.clear())
    bridge.close()
