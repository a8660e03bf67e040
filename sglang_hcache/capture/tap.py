"""The first stage of saving: a snapshot of every layer's rows during the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_hcache.capture.device_ring import DeviceRing
from sglang_hcache.capture.events import Event, RequestRows, RowsCaptured
from sglang_hcache.capture.sources import RowSource, hidden_source
from sglang_hcache.capture.staging import RowSpan, StagingRing
from sglang_hcache.core.observer import Observer


class Tap:
    """Receives the rows of one forward pass at a time. All calls come from the serving thread.

    ``begin_pass`` -> ``layer`` or ``layers`` for every layer -> ``end_pass``. Outside of a pass they do nothing.

    Args:
        device: brings rows from a device beside the CPU into the ring; None: they are in this memory.
    """

    def __init__(
        self,
        ring: StagingRing,
        publish: Callable[[Event], None],
        observer: Observer,
        device: DeviceRing | None = None,
    ) -> None:
        self._ring = ring
        self._device = device
        self._publish = publish
        self._observer = observer
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._span: RowSpan | None = None
        self._rows: list[torch.Tensor] = []
        """Of each layer in the ring, once a layer of the pass is written into it."""
        self._layers_seen = 0

    def begin_pass(self, tokens: torch.Tensor) -> None:
        """A forward pass over ``tokens``, (rows,), starts. Takes what staging has room for; the rest is dropped."""
        self._layers_seen = 0
        self._tokens = tokens.clone() if self._device is None else self._device.values(tokens)
        num_rows = len(tokens)
        self._span = self._ring.reserve(num_rows)
        if self._span is None and num_rows > self._ring.num_rows:
            self._span = self._ring.reserve(self._ring.num_rows)
        self._rows = []
        dropped = num_rows - (self._span.count if self._span else 0)
        if dropped:
            self._observer.count("capture.rows_dropped_staging_full", dropped)

    @property
    def layers_seen(self) -> int:
        """Of this pass, so far. 0 if it is replayed: no hook of Python's runs then."""
        return self._layers_seen

    @property
    def rows_wanted(self) -> int:
        """Rows of this pass that there is room for."""
        return 0 if self._span is None else self._span.count

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        """Snapshot hidden states of layer ``index``: (rows, width)."""
        if self._span is None:
            return
        num_rows = len(hidden)
        if num_rows < self._span.count:
            # Not the pass that was announced (a warm-up, a draft model): keep nothing of it.
            self._drop()
        elif self._device is None:
            self._rows = self._rows or self._ring.rows(self._span)
            whole = num_rows == self._span.count  # to cut costs more than to copy a few rows
            self._rows[index].copy_(hidden if whole else hidden[: self._span.count])
            self._layers_seen += 1
        else:
            self.layers(index, 1, hidden_source(hidden[None]))

    def layers(self, first: int, count: int, source: RowSource) -> None:
        """Snapshot what is stored of neighbouring layers of equal rows."""
        span = self._span
        if span is None:
            return
        self._layers_seen += count
        into = self._ring.layers(span, first, count)
        if self._device is None:
            source(into, slice(0, count), slice(0, span.count))
        else:
            self._device.take(source, into)

    def end_pass(self, requests: Sequence[RequestRows], *, can_wait: bool = False) -> None:
        """The pass is over: hand its rows to the assembler. Tokens are handed over even where rows were dropped.

        Args:
            can_wait: as in :class:`RowsCaptured`.
        """
        if self._span is not None and self._layers_seen != self._ring.num_layers:
            self._drop()
        span, self._span = self._span, None
        if span is not None:
            self._observer.count("capture.rows", span.count)
        ready = None if self._device is None else self._device.taken()
        self._publish(RowsCaptured(tuple(requests), self._tokens, span, ready, can_wait))

    def abandon_pass(self) -> None:
        """The pass failed: forget its rows."""
        if self._span is not None:
            self._ring.release(self._span)
            self._span = None

    def _drop(self) -> None:
        assert self._span is not None
        self._observer.count("capture.rows_dropped_incomplete", self._span.count)
        self._ring.release(self._span)
        self._span = None
