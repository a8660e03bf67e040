"""Hidden states of passes that are replayed: the recorded pass itself leaves them here [HCache §4.2.2].

Python's hooks run while CUDA records a pass, once for each number of rows, and not when it is replayed. What a hook
asks the device for meanwhile becomes a part of the recorded pass: here, to copy a layer's rows into memory that stays.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch

from sglang_hcache.device.streams import Streams


class ReplayedRows:
    """The last replayed pass's hidden states of all layers. Called on the serving thread.

    Args:
        most_rows: of a recorded pass; larger ones are left alone.
    """

    def __init__(
        self, streams: Streams, num_layers: int, width: int, most_rows: int, dtype: torch.dtype
    ) -> None:
        self._streams = streams
        with torch.inference_mode(False):  # else nobody outside of that mode could write to it
            self._rows = torch.zeros(num_layers, most_rows, width, dtype=dtype, device=streams.device)
        # Rows of a recorded pass -> layer -> how often it was recorded: decoding and prefill have the same sizes.
        self._recorded: dict[int, Counter[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._rows.nbytes

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer's attention, (rows, width): copied wherever the pass that is recorded is replayed."""
        if not self._streams.is_recording():
            return
        count = len(hidden)
        layers = self._recorded.setdefault(count, Counter())
        if count <= self._rows.shape[1]:
            # Detached: some models are recorded with gradients.
            self._streams.inline(partial(self._rows[layer, :count].copy_, hidden.detach()))
            layers[layer] += 1

    def holds(self, count: int) -> bool:
        """Whether replaying ``count`` rows, in the next larger recorded pass, leaves the rows of all layers."""
        sizes = [size for size in self._recorded if size >= count]
        if not sizes:
            return False
        layers = self._recorded[min(sizes)]
        return len(layers) == len(self._rows) and len(set(layers.values())) == 1

    def layers(self, first: int, count: int) -> torch.Tensor:
        """Rows of layers [first, first + count): (count, most_rows, width), valid until the next pass."""
        return self._rows[first : first + count]
