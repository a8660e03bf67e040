"""What is stored of a forward pass, and where it is found: hidden states as layers show them, K and V in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.capture.replayed import ReplayedRows
from sglang_hcache.capture.sources import HiddenSource, KVSource
from sglang_hcache.capture.tap import Tap
from sglang_hcache.core.layout import Method
from sglang_hcache.device.kv_gather import KVGather


class PassCapture:
    """Brings one forward pass at a time to ``tap``. All calls come from the serving thread.

    ``begin`` -> :meth:`on_layer`, as hooks call it -> ``end`` or ``abandon``.

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
        self.hidden_layers = [layer for layer, method in enumerate(methods) if method is Method.HIDDEN]
        self._hidden_runs = _runs(self.hidden_layers)
        self._kv_runs = _runs([layer for layer, method in enumerate(methods) if method is Method.KV])
        self._is_on = False

    def begin(self, tokens: torch.Tensor) -> None:
        """A pass over ``tokens``, (rows,) int64, begins."""
        self._is_on = True
        self._tap.begin_pass(tokens)

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer's attention, (rows, width). Outside of a pass nothing happens."""
        if self._is_on:
            self._tap.layer(layer, hidden)

    def end(self, requests: Sequence[RequestRows], slots: torch.Tensor, *, is_replayed: bool) -> None:
        """The pass succeeded.

        Args:
            slots: where it has written K and V, (rows,) int64.
            is_replayed: it was recorded before: no hook of Python's ran.
        """
        self._is_on = False
        if is_replayed:
            self._take_replayed(len(slots))
        if self._tap.layers_seen == len(self.hidden_layers):  # else it is dropped anyway
            self._take_kv(slots[: self._tap.rows_wanted])
        self._tap.end_pass(requests)

    def abandon(self) -> None:
        """The pass failed."""
        self._is_on = False
        self._tap.abandon_pass()

    def _take_replayed(self, num_rows: int) -> None:
        if self._replayed is None or not self._replayed.holds(num_rows):
            return
        for first, count in self._hidden_runs:
            self._tap.layers(first, count, HiddenSource(self._replayed.layers(first, count)))

    def _take_kv(self, slots: torch.Tensor) -> None:
        # At once, for the scheduler may free or move slots before the assembler comes to them.
        for first, count in self._kv_runs if len(slots) else ():
            self._tap.layers(first, count, KVSource(self._gather, first, slots))


def _runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """First and count of each of the stretches of neighbours in ``layers``."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and sum(runs[-1]) == layer:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return runs
