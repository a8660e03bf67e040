"""What is stored of a forward pass, and where it is found: hidden states as layers show them, K and V in the pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from sglang_hcache.capture.events import RequestRows, complete_no_chunk
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.capture.sources import hidden_source, kv_source
from sglang_hcache.capture.tap import Tap
from sglang_hcache.core.layout import Method
from sglang_hcache.core.stretches import stretches
from sglang_hcache.device.kv_gather import KVGather

_FEW_ROWS = 64


class PassCapture:
    """Brings one forward pass at a time to ``tap``. All calls come from the serving thread.

    ``begin`` -> :meth:`on_layer`, as hooks call it -> ``end`` or ``abandon``.

    K and V of a layer are taken when a later layer begins: a large pass goes on while they are on their way. Of a small
    one all are taken at its end, in the fewest pieces.

    Args:
        methods: what each layer stores.
        gather: reads K and V that the pass has written.
        replayed: where recorded passes leave hidden states; None: no pass is replayed, or none are stored.
    """

    def __init__(
        self, tap: Tap, methods: Sequence[Method], gather: KVGather, replayed: ReplayedRows | None
    ) -> None:
        self._tap = tap
        self._gather = gather
        self._replayed = replayed
        self._hidden_stretches = stretches(
            layer for layer, method in enumerate(methods) if method is Method.HIDDEN
        )
        self._kv_layers = [layer for layer, method in enumerate(methods) if method is Method.KV]
        self._methods = tuple(methods)
        self._kv_taken = 0
        self._is_large = False
        self._slots: torch.Tensor | None = None

    def begin(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """A pass begins.

        Args:
            tokens: (rows,) int64.
            slots: where it writes K and V, (rows,) int64.
        """
        self._slots, self._kv_taken = slots, 0
        self._is_large = len(slots) > _FEW_ROWS
        self._tap.begin_pass(tokens)

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer's attention, (rows, width). Outside of a pass nothing happens."""
        if self._slots is None:
            return
        if self._is_large and len(self._slots) <= len(hidden):
            self._take_kv(self._slots, layer)
        if self._methods[layer] is Method.HIDDEN:
            self._tap.layer(layer, hidden)

    def end(self, requests: Sequence[RequestRows], *, is_replayed: bool, is_prefill: bool = False) -> None:
        """The pass succeeded.

        Args:
            is_replayed: it was recorded before: no hook of Python's ran.
            is_prefill: among the passes of prefills, not of decoding.
        """
        assert self._slots is not None
        slots, self._slots = self._slots, None
        if is_replayed:
            self._take_replayed(len(slots), is_prefill)
        kv_left = len(self._kv_layers) - self._kv_taken
        if self._tap.layers_seen + kv_left == len(self._methods):  # else it is dropped anyway
            self._take_kv(slots, len(self._methods))
        self._tap.end_pass(requests, can_wait=not is_prefill and complete_no_chunk(requests))

    def abandon(self) -> None:
        """The pass failed."""
        self._slots = None
        self._tap.abandon_pass()

    def _take_replayed(self, num_rows: int, is_prefill: bool) -> None:
        if self._replayed is None or not self._replayed.holds(num_rows, is_prefill=is_prefill):
            return
        for first, count in self._hidden_stretches:
            self._tap.layers(first, count, hidden_source(self._replayed.layers(first, count)))

    def _take_kv(self, slots: torch.Tensor, before: int) -> None:
        """K and V of the layers before ``before``, but for those that were taken: soon somebody else has the slots."""
        wanted = slots[: self._tap.rows_wanted]
        taken, self._kv_taken = self._kv_taken, bisect_left(self._kv_layers, before)
        if len(wanted):
            for first, count in stretches(self._kv_layers[taken : self._kv_taken]):
                self._tap.layers(first, count, kv_source(self._gather, first, wanted))
