"""Saving passes that are not recorded: rows are those of the moment, though they are copied much later.

K and V of a large pass are taken layer by layer, beside later layers; those of a small one at once.

The device is simulated (``tests/unit/restore/delayed_streams.py``).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sglang_hcache.capture import passes
from sglang_hcache.capture.device_ring import NUM_BUFFERS, DeviceRing
from sglang_hcache.capture.events import RequestBegins, RequestRows, RowsCaptured
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from tests.unit.capture.save_parts import SaveParts
from tests.unit.restore.delayed_streams import MODEL, ORDERS, DelayedMark, DelayedStreams

NAMESPACE = Namespace(model=b"m", layout="test")
WIDTH, SLOTS = 6, 512
METHODS = (Method.KV, Method.KV, Method.HIDDEN, Method.KV, Method.HIDDEN, Method.KV)
LAYOUT = StateLayout.of(METHODS, 4 * WIDTH, 8 * WIDTH)
PROMPT = array("q", range(1000, 1000 + 3 * CHUNK_TOKENS))


class PrefillingServer(SaveParts):
    """The serving thread of a model whose passes are not recorded, on ``streams``.

    Args:
        loses: a layer's K and V are somebody else's once the layer after the next begins: seen by who comes late.
    """

    def __init__(self, streams: DelayedStreams, *, loses: bool) -> None:
        super().__init__(LAYOUT, 8, 256)
        self.streams = streams
        self._loses = loses
        self.pool = torch.full((len(METHODS), SLOTS, 2 * WIDTH), torch.nan)
        self.gathered: list[tuple[int, int]] = []
        self.passes = self.capture(METHODS, self._gather, DeviceRing(streams, 40 * 4 * WIDTH))

    def save(self, *ends: int) -> None:
        """Passes over the prompt, up to each of ``ends``."""
        self.assembler.publish(RequestBegins("a", NAMESPACE, array("q")))
        for first, end in zip((0, *ends), ends, strict=False):
            slots = torch.arange(first, end) + 7
            self._begin_pass(first, end, slots)
            for layer in range(len(METHODS)):
                self._layer(layer, first, end, slots)
            self.passes.end([RequestRows("a", first, 0, end - first)], is_replayed=False)
            self.streams.put(MODEL, lambda: self.pool.fill_(torch.nan))

    def is_right(self) -> bool:
        self.assembler.close()
        return list(self.chunks(NAMESPACE, PROMPT, stored_rows)) == [[], [], []]

    def _begin_pass(self, first: int, end: int, slots: torch.Tensor) -> None:
        """With tokens that the device has, and that the next pass overwrites."""
        tokens = torch.full((end - first,), -1)
        self.streams.put(MODEL, lambda: tokens.copy_(torch.tensor(PROMPT[first:end])))
        self.passes.begin(tokens, slots)
        self.streams.put(MODEL, lambda: tokens.fill_(-1))

    def _layer(self, layer: int, first: int, end: int, slots: torch.Tensor) -> None:
        rows = torch.zeros(end - first, 2 * WIDTH)
        self.streams.put(MODEL, lambda: rows.copy_(true_rows(layer, first, end)))
        self.passes.on_layer(layer, rows[:, :WIDTH])
        self.streams.put(MODEL, partial(self._write, layer, slots, rows))

    def _write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self.pool[layer, slots] = rows
        if self._loses and layer:
            self.pool[layer - 1, slots] = torch.nan
        rows.fill_(torch.nan)

    def _gather(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        self.gathered.append((first, len(into)))
        into.copy_(self.pool[first : first + len(into), slots])


def stored_rows(layer: int, first: int, end: int) -> torch.Tensor:
    return true_rows(layer, first, end)[:, : LAYOUT.row_bytes[layer] // 4]


def true_rows(layer: int, first: int, end: int) -> torch.Tensor:
    return 1e4 * layer + 16 * torch.arange(first, end).float()[:, None] + torch.arange(2 * WIDTH)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [0, 2])
@pytest.mark.parametrize(
    ("loses", "ends"), [(True, (65,)), (False, (100, 101, 150))], ids=["large passes only", "of any size"]
)
def test_rows_are_those_of_the_moment(order: str, eager: int, loses: bool, ends: tuple[int, ...]) -> None:
    """K and V of a large pass do not wait for its end."""
    for seed in range(4):
        server = PrefillingServer(DelayedStreams(order, seed, eager), loses=loses)
        server.save(*ends, len(PROMPT))
        assert server.is_right()


def test_a_small_pass_is_taken_in_the_fewest_pieces() -> None:
    server = PrefillingServer(DelayedStreams(), loses=False)
    server.save(*range(8, len(PROMPT) + 1, 8))
    assert server.is_right()
    assert server.gathered == len(PROMPT) // 8 * [(0, 2), (3, 1), (5, 1)]


@pytest.mark.parametrize(
    ("rows", "is_prefill", "can_wait"),
    [
        ([(70, 1), (126, 1)], False, True),
        ([(70, 1), (127, 1)], False, False),  # the last one of its chunk
        ([(70, 2)], False, False),
        ([(70, 1)], True, False),  # others may begin behind it at once
    ],
)
def test_which_rows_can_wait(rows: list[tuple[int, int]], is_prefill: bool, can_wait: bool) -> None:
    server = PrefillingServer(DelayedStreams(), loses=False)
    published: list[RowsCaptured] = []
    server.passes._publish = published.append  # type: ignore[assignment]
    server.passes.begin(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    requests = [RequestRows("a", position, row, count) for row, (position, count) in enumerate(rows)]
    server.passes.end(requests, is_replayed=False, is_prefill=is_prefill)
    assert [event.can_wait for event in published] == [can_wait]


def test_a_recorded_pass_that_stores_only_k_and_v_needs_no_hidden_states() -> None:
    server = PrefillingServer(DelayedStreams(), loses=False)
    capture = server.capture((Method.KV,) * 2, lambda *_: None)
    capture.begin(torch.zeros(2, dtype=torch.int64), torch.arange(2))
    capture.end([RequestRows("a", 0, 0, 2)], is_replayed=True)
    assert server.counters["capture.rows"] == 2


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before they are written": lambda patch: patch.setattr(
        passes, "bisect_left", lambda layers, before: sum(layer <= before for layer in layers)
    ),
    "at the end": lambda patch: patch.setattr(passes, "_FEW_ROWS", 1000),
    "before they are in host memory": lambda patch: patch.setattr(
        DeviceRing, "taken", lambda ring: DelayedMark(ring._streams, ())
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_k_and_v_that_are_taken_at_another_moment_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name](monkeypatch)
    server = PrefillingServer(DelayedStreams(), loses=True)
    server.save(65, len(PROMPT))
    assert not server.is_right()


def test_the_serving_thread_never_waits_for_the_device() -> None:
    streams, serving, waited = DelayedStreams(), threading.get_ident(), []
    go_on = streams.go_on

    def watched(*args: Any, **named: Any) -> bool:
        waited.append(threading.get_ident() == serving)
        return go_on(*args, **named)

    streams.go_on = watched  # type: ignore[method-assign]
    server = PrefillingServer(streams, loses=False)
    server.save(100, len(PROMPT))
    assert server.is_right()
    assert waited
    assert not any(waited)


def test_the_memory_of_the_ring_is_bounded() -> None:
    assert DeviceRing(DelayedStreams(), 240).num_bytes == NUM_BUFFERS * 240


def test_layers_without_a_hook_are_taken_at_the_end() -> None:
    """As those of a model whose attention is not known."""
    server = PrefillingServer(DelayedStreams(), loses=False)
    server.passes.on_layer, on_layer = (  # type: ignore[method-assign]
        lambda layer, hidden: on_layer(layer, hidden) if METHODS[layer] is Method.HIDDEN else None,
        server.passes.on_layer,
    )
    server.save(100, len(PROMPT))
    assert server.is_right()


def test_rows_of_another_pass_are_not_taken_for_its_own() -> None:
    server = PrefillingServer(DelayedStreams(), loses=False)
    server.passes.begin(torch.tensor(PROMPT), torch.arange(len(PROMPT)))
    for layer in range(len(METHODS)):
        server.passes.on_layer(layer, torch.zeros(3, WIDTH))
    server.passes.end([RequestRows("a", 0, 0, len(PROMPT))], is_replayed=False)
    assert not server.gathered
    assert server.counters.snapshot()["capture.rows_dropped_incomplete"] == len(PROMPT)
