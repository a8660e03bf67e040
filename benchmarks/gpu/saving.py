"""Saving what a pass computes, without a model: prefill, and decode passes that a CUDA graph replays.

Layers are stood for by a formula, so that every saved row is known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gpu.results import Report
from gpu.shapes import SHAPES, Shape
from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.events import Event, RowsCaptured
from sglang_hcache.capture.passes import PassCapture
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import HostMemory, PinnedMemory
from sglang_hcache.device.streams import CudaStreams, Streams
from sglang_hcache.device.triton_layers import TritonGather
from sglang_hcache.restore.methods import ROWS_AT_ONCE

SIZES = (1, 8, 64, 256)
"""Rows of recorded passes."""
STEPS, PREFILL, LAYERS = 60, 3000, 8
_EXACT = 251  # whole numbers below it are exact in every type

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what is asked of the device, not done now; returns what does it."""


class SavingCheck:
    """A model's serving thread, and what it saves.

    Args:
        methods: what each layer stores; K and V have the rows of hidden states here, half each.
    """

    def __init__(
        self,
        streams: Streams,
        memory: HostMemory,
        record: Record,
        methods: Sequence[Method],
        width: int,
        dtype: torch.dtype,
        *,
        sizes: Sequence[int] = SIZES,
        prefill: int = PREFILL,
    ) -> None:
        self._streams = streams
        self._layout = StateLayout.of(methods, width * dtype.itemsize, width * dtype.itemsize)
        most = max(prefill, 2 * max(sizes))
        staging = torch.from_numpy(memory(2 * most * sum(self._layout.row_bytes)))
        self._ring = StagingRing(staging, self._layout, dtype)
        device_ring = DeviceRing(streams, min(ROWS_AT_ONCE, prefill // 2) * width * dtype.itemsize)
        self._events: list[RowsCaptured] = []
        self._prefill = prefill
        self.replayed = ReplayedRows(
            streams, len(methods), width, max(sizes), dtype, is_prefill=lambda: False, may_fork=lambda: True
        )
        new = partial(torch.zeros, device=streams.device)
        self._inputs, self._slots = new(most, dtype=torch.int64), new(most, dtype=torch.int64)
        self._hidden = new(most, width, dtype=dtype)
        self.pool = new(2, len(methods), 2 * most, 1, width // 2, dtype=dtype)
        self._num_slots = 2 * most - 1
        gather = TritonGather(list(zip(*self.pool, strict=True)))
        self._passes = PassCapture(
            *(self._ring, self._take, Counters(), methods, gather, device_ring, self.replayed)
        )
        self._columns = torch.arange(width, device=streams.device)
        self._graphs = {
            size: record(partial(self._model, size, True)) for size in sorted(sizes, reverse=True)
        }

    def wrong_rows(self, steps: int = STEPS) -> int:
        """Rows that are not saved as they were, or not at all: of prefills and decode passes in turns."""
        expected: list[torch.Tensor] = []
        wrong = 0
        for step in range(steps):
            tokens, size = pass_of(step, list(self._graphs), self._prefill, self._num_slots)
            expected.append(tokens)
            self.run(tokens.to(self._streams.device), size)
            while len(self._events) > 1:  # as the assembler does beside it
                wrong += self._wrong_in_first(expected)
        while self._events:
            wrong += self._wrong_in_first(expected)
        return wrong

    def run(self, tokens: torch.Tensor, size: int | None, *, is_saved: bool = True) -> None:
        """One pass over ``tokens``: recorded with ``size`` rows, or by itself."""
        count = len(tokens)
        if is_saved:
            self._passes.begin(tokens, self._slots[:count])
        self._streams.inline(partial(self._inputs[:count].copy_, tokens))
        self._streams.inline(partial(self._slots[:count].copy_, tokens % self._num_slots))
        if size is None:
            self._model(count, False)
        else:
            self._graphs[size]()
        if is_saved:
            self._passes.end([], is_replayed=size is not None)
        self._streams.inline(partial(self._hidden.fill_, -1))  # it is somebody else's now

    def forget(self) -> None:
        """Whatever was saved is not looked at."""
        for event in self._events:
            if event.span is not None:
                self._ring.release(event.span)
        self._events.clear()

    def _take(self, event: Event) -> None:
        assert isinstance(event, RowsCaptured)
        self._events.append(event)

    def _wrong_in_first(self, expected: list[torch.Tensor]) -> int:
        event, tokens = self._events.pop(0), expected.pop(0)
        assert event.ready is not None
        event.ready.wait()
        if event.span is None or not torch.equal(event.tokens.cpu(), tokens):
            return len(tokens)
        wrong = 0
        for layer in range(self._layout.num_layers):
            found = self._ring.layers(event.span, layer, 1)[0]
            # On the device: a CPU takes half a minute for it.
            true = _rows_of(layer, tokens.to(self._columns.device), self._columns).to(found.dtype)
            wrong += int((found.to(true.device) != true).any(dim=1).sum())
        self._ring.release(event.span)
        return wrong

    def _model(self, size: int, is_recorded: bool) -> None:
        hidden = self._hidden[:size]
        for layer in range(self._layout.num_layers):
            self._streams.inline(partial(self._compute, layer, size))
            (self.replayed if is_recorded else self._passes).on_layer(layer, hidden)
            self._streams.inline(partial(self._write, layer, size))
            if is_recorded:
                self.replayed.end_layer()
            self._streams.inline(partial(hidden.fill_, -1))  # as SGLang's norms write in place

    def _compute(self, layer: int, size: int) -> None:
        self._hidden[:size] = _rows_of(layer, self._inputs[:size], self._columns).to(self._hidden.dtype)

    def _write(self, layer: int, size: int) -> None:
        key, value = self._hidden[:size, None].chunk(2, dim=-1)
        self.pool[0, layer, self._slots[:size]], self.pool[1, layer, self._slots[:size]] = key, value


def pass_of(step: int, sizes: Sequence[int], prefill: int, num_slots: int) -> tuple[torch.Tensor, int | None]:
    """Tokens, no two of which have one slot, and the rows of the recorded pass; None: a prefill."""
    is_prefill, size = step % 8 == 7, sizes[step % len(sizes)]
    count = prefill - step if is_prefill else max(1, size - step % 3)
    return torch.arange(100 * step, 100 * step + count) % num_slots, None if is_prefill else size


def measure(report: Report) -> None:
    """Every kind of layout with the largest shapes; microseconds that saving adds to a replayed pass."""
    memory = PinnedMemory()  # which must live as long as the process
    hidden, kv = Method.HIDDEN, Method.KV
    layouts = {"hidden": (hidden,) * LAYERS, "kv": (kv,) * LAYERS, "mixed": (hidden, hidden, kv, hidden) * 2}
    with torch.inference_mode():
        for name, methods in layouts.items():
            for shape in SHAPES[1:3]:
                report(f"{shape.name}, {name}", _measure_one(shape, methods, memory))
                torch.cuda.empty_cache()


def _measure_one(shape: Shape, methods: Sequence[Method], memory: HostMemory) -> dict[str, Any]:
    streams = CudaStreams(torch.device("cuda", 0))
    check = SavingCheck(streams, memory, record_with_cuda, methods, shape.hidden_size, torch.bfloat16)
    wrong = check.wrong_rows()
    tokens = torch.arange(SIZES[-1], device=streams.device)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(20):
        for is_saved, seconds in times.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            check.run(tokens, SIZES[-1], is_saved=is_saved)
            torch.cuda.current_stream().synchronize()
            seconds.append(time.perf_counter() - began)
            check.forget()
    with_it, without = (statistics.median(times[is_saved]) for is_saved in (True, False))
    return {
        "ok": wrong == 0,
        "wrong_rows": wrong,
        "rows": SIZES[-1],
        "layers": len(methods),
        "microseconds_added": 1e6 * (with_it - without),
    }


def record_with_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Of a CUDA graph."""
    work()  # what is compiled or allocated at first must not be recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _rows_of(layer: int, tokens: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(n, width): whole numbers that say which row they are of."""
    return (31 * tokens[:, None] + 7 * layer + 3 * columns) % _EXACT
