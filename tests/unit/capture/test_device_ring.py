"""Saving from a GPU: rows are those of the moment, though they are copied much later.

The device is simulated (``tests/unit/restore/delayed_streams.py``). All layers of all passes have their rows in one
piece of memory, which the next layer overwrites.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_hcache.capture.device_ring import NUM_BUFFERS, DeviceRing
from sglang_hcache.capture.events import RequestBegins, RequestRows
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from tests.unit.capture.save_parts import SaveParts
from tests.unit.restore.delayed_streams import MODEL, ORDERS, DelayedMark, DelayedStreams

NAMESPACE = Namespace(model=b"m", layout="test")
LAYERS, WIDTH, ROWS_AT_ONCE = 7, 6, 40
LAYOUT = StateLayout.of((Method.HIDDEN, Method.KV) * 3 + (Method.HIDDEN,), 4 * WIDTH, 8 * WIDTH)
PROMPT = array("q", range(1000, 1000 + 3 * CHUNK_TOKENS))


class SavePath(SaveParts):
    """The serving thread of a model on ``streams``, which saves one prompt."""

    def __init__(self, streams: DelayedStreams) -> None:
        super().__init__(LAYOUT, 8, 256)
        self.passes = self.capture(device=DeviceRing(streams, ROWS_AT_ONCE * max(LAYOUT.row_bytes)))
        self.streams = streams
        self.tokens = torch.zeros(len(PROMPT), dtype=torch.int64)
        self.shared = torch.zeros(len(PROMPT), 2 * WIDTH)

    def save(self, cuts: Sequence[int]) -> None:
        """Passes over the prompt's pieces, as the scheduler has them: nobody waits for the device in between."""
        self.assembler.publish(RequestBegins("a", NAMESPACE, array("q")))
        for first, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
            self._begin_pass(first, end)
            for layer in range(LAYERS):
                self._layer(layer, first, end)
            self.passes.end([RequestRows("a", first, 0, end - first)], is_replayed=False)

    def _begin_pass(self, first: int, end: int) -> None:
        """With tokens that the device has, and that the next pass overwrites."""
        self.streams.put(MODEL, lambda: self.tokens[: end - first].copy_(torch.tensor(PROMPT[first:end])))
        tokens = self.tokens[: end - first]
        self.passes.begin(tokens, tokens)
        self.streams.put(MODEL, lambda: self.tokens.fill_(-1))

    def _layer(self, layer: int, first: int, end: int) -> None:
        rows = self.shared[: end - first]
        self.streams.put(MODEL, lambda: rows.copy_(true_rows(layer, first, end)))
        self.passes.on_layer(layer, rows[:, : LAYOUT.row_bytes[layer] // 4])
        self.streams.put(MODEL, lambda: rows.fill_(torch.nan))  # the model's memory is somebody else's now

    def wrong(self) -> list[str]:
        """What is stored wrongly, or not at all."""
        self.assembler.close()
        found = []
        for index, wrong in enumerate(self.chunks(NAMESPACE, PROMPT, stored_rows)):
            if wrong is None:
                found.append(f"chunk {index} is missing")
            else:
                found += [f"chunk {index}, layer {layer}" for layer in wrong]
        return found


def stored_rows(layer: int, first: int, end: int) -> torch.Tensor:
    return true_rows(layer, first, end)[:, : LAYOUT.row_bytes[layer] // 4]


def true_rows(layer: int, first: int, end: int) -> torch.Tensor:
    positions = torch.arange(first, end).float()[:, None]
    return 1e4 * layer + 16 * positions + torch.arange(2 * WIDTH)


def saved_wrongly(order: str, seed: int, eager: int = 0) -> list[str]:
    path = SavePath(DelayedStreams(order, seed, eager))
    path.save([100, 101, 150])
    return path.wrong()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [0, 1])
def test_rows_are_those_of_the_moment(order: str, eager: int) -> None:
    for seed in range(4):
        assert not saved_wrongly(order, seed, eager)


def _ignored(*_: object) -> None:
    pass


def _reached(streams: DelayedStreams) -> DelayedMark:
    return DelayedMark(streams, ())


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a buffer is filled before it is copied": lambda patch: patch.setattr(
        DelayedStreams, "hold_up", _ignored
    ),
    "a buffer is copied before it is filled": lambda patch: patch.setattr(
        DelayedStreams, "copy_after", _ignored
    ),
    "rows are read before they are there": lambda patch: patch.setattr(
        DeviceRing, "taken", lambda ring: _reached(ring._streams)
    ),
    "rows are taken later than asked": lambda patch: patch.setattr(
        DelayedStreams, "inline", DelayedStreams.compute
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert any(
        saved_wrongly(order, seed, eager) for seed in range(20) for order in ORDERS for eager in (0, 1)
    )


def test_the_serving_thread_never_waits_for_the_device() -> None:
    streams = DelayedStreams()
    path = SavePath(streams)
    serving, waited = threading.get_ident(), []
    go_on = streams.go_on

    def watched(*args: Any, **named: Any) -> bool:
        waited.append(threading.get_ident() == serving)
        return go_on(*args, **named)

    streams.go_on = watched  # type: ignore[method-assign]
    path.save([100])
    assert not path.wrong()
    assert waited
    assert not any(waited)


def test_its_memory_is_bounded() -> None:
    assert DeviceRing(DelayedStreams(), 240).num_bytes == NUM_BUFFERS * 240
