"""Decoding by passes that a device recorded: nobody calls Python's hooks, and what layers had is saved all the same.

The device is simulated (``tests/unit/restore/delayed_streams.py``). A recorded pass has one piece of memory for the
hidden states of all layers, as CUDA graphs have, and one for its inputs; a larger pass than needed has rows of nobody.
"""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import pytest
import torch

from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.events import RequestBegins, RequestRows
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from tests.unit.capture.save_parts import SaveParts, join_late
from tests.unit.restore.delayed_streams import (
    FORKED,
    MODEL,
    ORDERS,
    DelayedMark,
    DelayedStreams,
    UnjoinedError,
)

NAMESPACE = Namespace(model=b"m", layout="test")
WIDTH, MOST_ROWS, SLOTS = 6, 4, 512
METHODS = (Method.HIDDEN, Method.HIDDEN, Method.KV, Method.HIDDEN, Method.KV, Method.KV)
LAYOUT = StateLayout.of(METHODS, 4 * WIDTH, 4 * WIDTH)
"""Rows of one size: what is stored differs where the layout sees no difference."""
SIZES = (2, 4)


class Pool:
    """K and V of all layers, in one tensor."""

    def __init__(self) -> None:
        self.rows = torch.zeros(len(METHODS), SLOTS, WIDTH)

    def gather(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        into.copy_(self.rows[first : first + len(into), slots])


class DecodingServer(SaveParts):
    """The serving thread of a model that decodes by recorded passes; a request's tokens are known beforehand."""

    def __init__(self, streams: DelayedStreams, most_rows: int = MOST_ROWS) -> None:
        # A buffer holds two layers of a full pass: it goes to the host in pieces.
        device_ring = DeviceRing(streams, 2 * MOST_ROWS * 4 * WIDTH)
        super().__init__(LAYOUT, 32, 1024)
        self.streams = streams
        self.is_prefill = False
        self.replayed = ReplayedRows(
            streams,
            len(METHODS),
            WIDTH,
            most_rows,
            torch.float32,
            is_prefill=lambda: self.is_prefill,
            may_fork=lambda: not self.is_prefill,
        )
        self.pool = Pool()
        self.passes = self.capture(METHODS, self.pool.gather, device_ring, self.replayed)
        self.inputs = torch.zeros(8, dtype=torch.int64)
        self.slots = torch.zeros(8, dtype=torch.int64)
        self.hidden = torch.zeros(8, WIDTH)
        self.recorded: dict[int, Callable[[], None]] = {}
        self.used = 8  # padding writes to the slots before

    def record(self, sizes: Sequence[int] = SIZES, layers: int = len(METHODS)) -> None:
        for size in sorted(sizes, reverse=True):
            self.recorded[size] = self.streams.record(partial(self._model, size, layers))

    def decode(self, requests: Sequence[tuple[str, int, int]]) -> None:
        """One pass over (request, position, token)."""
        self.forward([(rid, position, [token]) for rid, position, token in requests])

    def forward(self, requests: Sequence[tuple[str, int, Sequence[int]]]) -> None:
        """One pass over (request, first position, tokens): of prefills if they are several."""
        flat = [token for _, _, tokens in requests for token in tokens]
        count = len(flat)
        size = min(size for size in self.recorded if size >= count)
        tokens = torch.tensor(flat)
        slots = torch.arange(self.used, self.used + count)
        self.used += count
        given = torch.full((8,), -7)
        self.streams.put(MODEL, lambda: given[:count].copy_(tokens))
        self.passes.begin(given[:count], slots)
        self.streams.put(MODEL, lambda: self.inputs[:count].copy_(given[:count]))
        self.streams.put(MODEL, lambda: self.slots[:count].copy_(slots))
        self.recorded[size]()
        begins = [0, *accumulate(len(tokens) for _, _, tokens in requests)]
        rows = [
            RequestRows(rid, position, row, len(tokens))
            for row, (rid, position, tokens) in zip(begins, requests, strict=False)
        ]
        self.passes.end(rows, is_replayed=True, is_prefill=self.is_prefill)
        self.streams.put(MODEL, lambda: given.fill_(-7))

    def _model(self, size: int, layers: int) -> None:
        hidden = self.hidden[:size]
        for layer in range(len(METHODS)):
            self.streams.inline(partial(self._hidden_of, layer, size))
            if layer < layers:
                self.replayed.on_layer(layer, hidden)
            self.passes.on_layer(layer, hidden)  # as the bridge's hooks do, outside of a pass of theirs
            self.streams.inline(partial(self._kv_of, layer, size))
            self.replayed.end_layer()
            self.streams.inline(lambda: self.hidden.fill_(torch.nan))  # as SGLang's norms write in place

    def _hidden_of(self, layer: int, size: int) -> None:
        self.hidden[:size] = true_rows(layer, self.inputs[:size])

    def _kv_of(self, layer: int, size: int) -> None:
        self.pool.rows[layer, self.slots[:size]] = true_rows(layer, self.inputs[:size])

    def saved(self, tokens: array[int]) -> list[bool]:
        """Which chunks are stored; those that are hold the right rows."""

        def true(layer: int, first: int, end: int) -> torch.Tensor:
            return true_rows(layer, torch.tensor(tokens[first:end]))

        found = list(self.chunks(NAMESPACE, tokens, true))
        if any(found):
            raise WrongRowsError(f"layers of each chunk: {found}")
        return [wrong is not None for wrong in found]


class WrongRowsError(Exception):
    pass


def true_rows(layer: int, tokens: torch.Tensor) -> torch.Tensor:
    return 1e4 * layer + 16 * tokens.float()[:, None] + torch.arange(WIDTH)


def tokens_of(request: int, count: int = CHUNK_TOKENS) -> array[int]:
    return array("q", range(100 * request, 100 * request + count))


def decoded(server: DecodingServer, steps: int = CHUNK_TOKENS) -> list[bool]:
    """Three requests, the last of which begins later and so ends the steps with a pass of one row; what is saved."""
    texts = {f"r{number}": tokens_of(number, steps) for number in range(3)}
    late = 10
    for rid in texts:
        server.assembler.publish(RequestBegins(rid, NAMESPACE, array("q")))
    for step in range(steps + late):
        at = {"r0": step, "r1": step, "r2": step - late}
        server.decode([(rid, at[rid], text[at[rid]]) for rid, text in texts.items() if 0 <= at[rid] < steps])
    server.assembler.close()
    return [is_saved for text in texts.values() for is_saved in server.saved(text)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("eager", [0, 3])
def test_replayed_passes_are_saved(order: str, eager: int) -> None:
    server = DecodingServer(DelayedStreams(order, 0, eager))
    server.record()
    assert decoded(server) == [True, True, True]
    assert server.counters.snapshot()["capture.rows"] == 3 * CHUNK_TOKENS


@pytest.mark.parametrize("order", ORDERS)
def test_replayed_prefills_are_saved(order: str) -> None:
    """Some tokens of two prompts in each pass, and a row of padding."""
    server = DecodingServer(DelayedStreams(order))
    server.record()
    server.is_prefill = True  # the graphs of another phase have the same sizes
    server.record()
    texts = {"a": tokens_of(0), "b": tokens_of(1, 2 * CHUNK_TOKENS)}
    for rid in texts:
        server.assembler.publish(RequestBegins(rid, NAMESPACE, array("q")))
    for step in range(CHUNK_TOKENS):
        pair = texts["b"][2 * step : 2 * step + 2]
        server.forward([("a", step, texts["a"][step : step + 1]), ("b", 2 * step, pair)])
    server.assembler.close()
    assert [server.saved(text) for text in texts.values()] == [[True], [True, True]]


def test_a_phase_whose_graphs_lack_a_layer_is_not_saved() -> None:
    server = DecodingServer(DelayedStreams())
    server.record()
    server.record(layers=len(METHODS) - 1)  # another of the same size
    assert not server.replayed.holds(2, is_prefill=False)


def test_prefills_whose_graphs_have_no_hook_of_ours_are_not_saved() -> None:
    """Not even where decode passes of that size were recorded as they should be: their rows lie there."""
    server = DecodingServer(DelayedStreams())
    server.record()
    decodes = dict(server.recorded)
    server.is_prefill = True
    server.record(layers=0)
    prefills = dict(server.recorded)
    texts = {"a": tokens_of(0), "b": tokens_of(1)}
    for rid in texts:
        server.assembler.publish(RequestBegins(rid, NAMESPACE, array("q")))
    for at in range(0, CHUNK_TOKENS, 2):
        for rid, graphs in (("a", decodes), ("b", prefills)):
            server.is_prefill, server.recorded = graphs is prefills, graphs
            server.forward([(rid, at, texts[rid][at : at + 2])])
    server.assembler.close()
    assert {rid: server.saved(text) for rid, text in texts.items()} == {"a": [True], "b": [False]}


def _ignored(*_: object) -> None:
    pass


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows are taken while they are written": lambda patch: patch.setattr(
        DelayedStreams, "inline", DelayedStreams.compute
    ),
    "a buffer is copied before it is filled": lambda patch: patch.setattr(
        DelayedStreams, "copy_after", _ignored
    ),
    "a buffer is filled before it is copied": lambda patch: patch.setattr(
        DelayedStreams, "hold_up", _ignored
    ),
    "layers of a piece are mixed up": lambda patch: patch.setattr(
        ReplayedRows, "layers", lambda self, first, count: self._rows[first : first + count].flip(0)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded as it should be, then served by the mutant."""

    def goes_wrong(order: str, seed: int, eager: int) -> bool:
        server = DecodingServer(DelayedStreams(order, seed, eager))
        server.record()
        with monkeypatch.context() as patch:
            MUTANTS[name](patch)
            try:
                return not all(decoded(server))
            except WrongRowsError:
                return True

    assert any(goes_wrong(order, seed, eager) for seed in range(20) for order in ORDERS for eager in (0, 3))


def _fork_unordered(streams: DelayedStreams, work: Callable[[], object]) -> DelayedMark:
    """Without the wait for what the model has queued so far."""
    mark = DelayedMark(streams, ())

    def ask() -> None:
        streams.put(FORKED, work)
        mark.counts = streams._mark(FORKED).counts

    streams._ask(ask)
    return mark


RECORDED_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a layer is copied before it is there": lambda patch: patch.setattr(
        DelayedStreams, "fork", _fork_unordered
    ),
    "a layer is copied after something else is there": lambda patch: join_late(patch, len(METHODS)),
    "nothing waits for a copy": lambda patch: patch.setattr(ReplayedRows, "end_layer", _ignored),
}


@pytest.mark.parametrize("name", RECORDED_MUTANTS)
def test_a_mutant_that_is_recorded_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RECORDED_MUTANTS[name](monkeypatch)

    def goes_wrong(order: str) -> bool:
        server = DecodingServer(DelayedStreams(order))
        try:
            server.record()
            return not all(decoded(server))
        except (WrongRowsError, UnjoinedError):
            return True

    assert any(goes_wrong(order) for order in ORDERS)


def test_layers_are_copied_beside_their_attention_where_that_is_recorded_with_them() -> None:
    server = DecodingServer(DelayedStreams())
    server.record()
    server.recorded[2]()
    assert server.streams.queues[FORKED].asked == len(METHODS)
    server.is_prefill = True  # not surely recorded in one
    server.record()
    server.recorded[2]()
    assert server.streams.queues[FORKED].asked == len(METHODS)


def test_what_is_copied_keeps_its_memory_until_the_attention_is_over() -> None:
    """CUDA forgets what it was asked to copy: the allocator would give that to another tensor of the same pass."""

    class Cuda(DelayedStreams):
        def fork(self, work: Callable[[], object]) -> DelayedMark:
            work()
            return super().fork(lambda: None)

    def record() -> list[bool]:
        hidden = torch.ones(2, WIDTH)
        memory = weakref.ref(hidden.untyped_storage())
        rows.on_layer(0, hidden)
        del hidden
        gc.collect()
        kept.append(memory() is not None)
        rows.end_layer()
        gc.collect()
        kept.append(memory() is not None)
        return kept

    streams, kept = Cuda(), list[bool]()
    rows = ReplayedRows(streams, 1, WIDTH, MOST_ROWS, torch.float32, lambda: False, lambda: True)
    streams.record(record)
    assert kept == [True, False]


def test_a_pass_that_was_not_recorded_whole_is_not_saved() -> None:
    """A layer without our hook, or a size that is larger than ours: what lies there is of another pass."""
    server = DecodingServer(DelayedStreams())
    server.record(layers=len(METHODS) - 1)
    assert decoded(server) == [False, False, False]
    assert server.counters.snapshot()["capture.rows_dropped_incomplete"] == 3 * CHUNK_TOKENS

    server = DecodingServer(DelayedStreams(), most_rows=2)
    server.record()
    assert server.replayed.holds(2, is_prefill=False)
    assert not server.replayed.holds(2, is_prefill=True)
    assert not server.replayed.holds(3, is_prefill=False)
    assert not server.replayed.holds(5, is_prefill=False)
    assert decoded(server) == [False, False, False], "three at a time, in a pass of four"


def test_outside_of_recording_nothing_is_copied() -> None:
    """Prefill, warm-up passes, and batches that are larger than any recorded pass."""
    streams = DelayedStreams()
    rows = ReplayedRows(streams, 2, WIDTH, MOST_ROWS, torch.float32, lambda: False, lambda: True)
    rows.on_layer(0, torch.ones(3, WIDTH))
    rows.end_layer()
    assert not streams.queues[MODEL].waiting
    assert not streams.queues[FORKED].waiting
    assert not rows.holds(1, is_prefill=False)
    assert rows.num_bytes == 2 * MOST_ROWS * WIDTH * 4
