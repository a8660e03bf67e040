"""The first stage of saving: what is stored of every layer goes into staging while the forward pass runs.

Hidden states are taken as layers show them, K and V out of the pool.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.events import Event, RequestRows, RowsCaptured, complete_no_chunk
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.capture.sources import RowSource, hidden_source, kv_source
from sglang_hcache.capture.staging import RowSpan, StagingRing
from sglang_hcache.core.layout import Method
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.stretches import stretches
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.device.kv_gather import KVGather

logger = logging.getLogger(__name__)

_FEW_ROWS = 64


class PassCapture:
    """Takes the rows of one forward pass at a time. All calls come from the serving thread.

    ``begin`` -> :meth:`on_layer`, as hooks call it -> ``end`` or ``abandon``. Outside of a pass hooks do nothing.

    K and V of a layer are taken when a later layer begins: a large pass goes on while they are on their way. Of a small
    one all are taken at its end, in the fewest pieces.

    Args:
        methods: what each layer stores.
        gather: reads K and V that the pass has written.
        device: brings rows from a GPU into the ring; None: they are in this memory.
        replayed: where recorded passes leave hidden states; None: no pass is replayed, or none are stored.
    """

    def __init__(
        self,
        ring: StagingRing,
        publish: Callable[[Event], None],
        observer: Observer,
        methods: Sequence[Method],
        gather: KVGather,
        device: DeviceRing | None = None,
        replayed: ReplayedRows | None = None,
    ) -> None:
        self._ring = ring
        self._publish = publish
        self._observer = observer
        self._methods = tuple(methods)
        self._hidden_stretches = stretches(
            layer for layer, method in enumerate(methods) if method is Method.HIDDEN
        )
        self._kv_layers = [layer for layer, method in enumerate(methods) if method is Method.KV]
        self._gather = gather
        self._device = device
        self._replayed = replayed
        self._tokens = self._slots = torch.empty(0, dtype=torch.int64)
        self._span: RowSpan | None = None
        """None: no pass, or nothing of it can be kept."""
        self._rows: list[torch.Tensor] = []
        """Each layer's in the ring, once a layer's hidden states are written into it."""
        self._layers_seen = self._kv_taken = 0
        self._is_incomplete = False
        self._may_warn = Throttle()

    def begin(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """A pass begins. What staging has room for is taken; the rest is dropped.

        Args:
            tokens: (rows,) int64.
            slots: where it writes K and V, (rows,) int64.
        """
        self._tokens = tokens.clone() if self._device is None else self._device.values(tokens)
        self._slots = slots
        self._rows, self._layers_seen, self._kv_taken, self._is_incomplete = [], 0, 0, False
        num_rows = len(tokens)
        self._span = self._ring.reserve(min(num_rows, self._ring.num_rows))
        dropped = num_rows - (self._span.count if self._span else 0)
        if dropped:
            self._observer.count("capture.rows_dropped_staging_full", dropped)

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer's attention, (rows, width)."""
        span = self._span
        if span is None:
            return
        num_rows = hidden.shape[0]  # len() of a tensor takes five times as long, and this runs in every layer
        if _FEW_ROWS < self._slots.shape[0] <= num_rows:
            self._take_kv(span, layer)
        if self._methods[layer] is not Method.HIDDEN:
            return
        if num_rows < span.count:
            # Not the pass that was announced (a warm-up, a draft model): keep nothing of it.
            self._drop(span)
        elif self._device is None:
            self._rows = self._rows or self._ring.rows(span)
            whole = num_rows == span.count  # to cut costs more than to copy a few rows
            self._rows[layer].copy_(hidden if whole else hidden[: span.count])
            self._layers_seen += 1
        else:
            self._take(span, layer, 1, hidden_source(hidden[None]))

    def end(self, requests: Sequence[RequestRows], *, is_replayed: bool, is_prefill: bool = False) -> None:
        """The pass succeeded: its rows go to the assembler. Tokens do even where rows were dropped.

        Args:
            is_replayed: it was recorded before: no hook of Python's ran.
            is_prefill: among the passes of prefills, not of decoding.
        """
        if self._span is not None:
            self._complete(self._span, is_replayed, is_prefill)
        ready = None if self._device is None else self._device.taken()
        can_wait = not is_prefill and complete_no_chunk(requests)
        span, self._span = self._span, None
        self._publish(RowsCaptured(tuple(requests), self._tokens, span, ready, can_wait, self._is_incomplete))

    def abandon(self) -> None:
        """The pass failed: forget its rows."""
        if self._span is not None:
            self._ring.release(self._span)
            self._span = None

    def _complete(self, span: RowSpan, is_replayed: bool, is_prefill: bool) -> None:
        """Take what hooks did not; nothing stays of a pass whose hidden states were not all seen, each once."""
        num_rows = len(self._tokens)
        if (
            is_replayed
            and self._replayed is not None
            and self._replayed.holds(num_rows, is_prefill=is_prefill)
        ):
            for first, count in self._hidden_stretches:
                self._take(span, first, count, hidden_source(self._replayed.layers(first, count)))
        kv_left = len(self._kv_layers) - self._kv_taken
        if self._layers_seen + kv_left != len(self._methods):
            self._drop(span)
            if self._may_warn():
                logger.warning(
                    "hcache: not all layers of a forward pass of %d tokens were seen, so it is not saved: a CUDA graph "
                    "may run it that was recorded without the tier", num_rows,
                )  # fmt: skip
            return
        self._take_kv(span, len(self._methods))
        self._observer.count("capture.rows", span.count)

    def _take_kv(self, span: RowSpan, before: int) -> None:
        """K and V of the layers before ``before``, but for those that were taken: soon somebody else has the slots."""
        slots = self._slots[: span.count]
        taken, self._kv_taken = self._kv_taken, bisect_left(self._kv_layers, before)
        for first, count in stretches(self._kv_layers[taken : self._kv_taken]):
            self._take(span, first, count, kv_source(self._gather, first, slots))

    def _take(self, span: RowSpan, first: int, count: int, source: RowSource) -> None:
        """What is stored of neighbouring layers of equal rows."""
        into = self._ring.layers(span, first, count)
        if self._device is None:
            source(into, slice(0, count), slice(0, span.count))
        else:
            self._device.take(source, into)
        self._layers_seen += count

    def _drop(self, span: RowSpan) -> None:
        self._observer.count("capture.rows_dropped_incomplete", span.count)
        self._is_incomplete = True
        self.abandon()
