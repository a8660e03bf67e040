"""When K and V of a pass are taken: of a large one layer by layer, beside later layers; of a small one at once.

The device is simulated (``tests/unit/restore/delayed_streams.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

import pytest
import torch

from sglang_hcache.capture import passes
from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.events import RequestBegins, RequestRows, RowsCaptured
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from tests.unit.capture.save_parts import SaveParts
from tests.unit.restore.delayed_streams import MODEL, ORDERS, DelayedStreams

NAMESPACE = Namespace(model=b"m", layout="test")
WIDTH, SLOTS = 6, 512
METHODS = (Method.KV, Method.KV, Method.HIDDEN, Method.KV, Method.HIDDEN, Method.KV)
LAYOUT = StateLayout.of(METHODS, 4 * WIDTH, 4 * WIDTH)
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
        self.pool = torch.full((len(METHODS), SLOTS, WIDTH), torch.nan)
        self.gathered: list[tuple[int, int]] = []
        self.passes = self.capture(METHODS, self._gather, DeviceRing(streams, 40 * 4 * WIDTH))

    def save(self, *ends: int) -> None:
        """Passes over the prompt, up to each of ``ends``."""
        self.assembler.publish(RequestBegins("a", NAMESPACE, array("q")))
        for first, end in zip((0, *ends), ends, strict=False):
            slots = torch.arange(first, end) + 7
            self.passes.begin(torch.tensor(PROMPT[first:end]), slots)
            for layer in range(len(METHODS)):
                self._layer(layer, first, end, slots)
            self.passes.end([RequestRows("a", first, 0, end - first)], is_replayed=False)
            self.streams.put(MODEL, lambda: self.pool.fill_(torch.nan))

    def is_right(self) -> bool:
        self.assembler.close()
        return list(self.chunks(NAMESPACE, PROMPT, true_rows)) == [[], [], []]

    def _layer(self, layer: int, first: int, end: int, slots: torch.Tensor) -> None:
        hidden = torch.zeros(end - first, WIDTH)
        self.streams.put(MODEL, lambda: hidden.copy_(true_rows(layer, first, end)))
        self.passes.on_layer(layer, hidden)
        self.streams.put(MODEL, partial(self._write, layer, slots, hidden))

    def _write(self, layer: int, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        self.pool[layer, slots] = hidden
        if self._loses and layer:
            self.pool[layer - 1, slots] = torch.nan
        hidden.fill_(torch.nan)

    def _gather(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        self.gathered.append((first, len(into)))
        into.copy_(self.pool[first : first + len(into), slots])


def true_rows(layer: int, first: int, end: int) -> torch.Tensor:
    return 1e4 * layer + 16 * torch.arange(first, end).float()[:, None] + torch.arange(WIDTH)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [0, 2])
def test_a_large_pass_does_not_wait_for_its_end(order: str, eager: int) -> None:
    server = PrefillingServer(DelayedStreams(order, 0, eager), loses=True)
    server.save(65, len(PROMPT))
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


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before they are written": lambda patch: patch.setattr(
        passes, "bisect_left", lambda layers, before: sum(layer <= before for layer in layers)
    ),
    "at the end": lambda patch: patch.setattr(passes, "_FEW_ROWS", 1000),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_k_and_v_that_are_taken_at_another_moment_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name](monkeypatch)
    server = PrefillingServer(DelayedStreams(), loses=True)
    server.save(65, len(PROMPT))
    assert not server.is_right()


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
