"""Hidden states of passes that are replayed: the recorded pass itself leaves them here [HCache §4.2.2].

Python's hooks run while CUDA records a pass, once for each number of rows, and not when it is replayed. What a hook
asks the device for meanwhile becomes a part of the recorded pass: here, to copy a layer's rows into memory that stays.
Where it may, that is done beside the layer's attention, not before it (docs/results-archive.md says what that saves).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from sglang_hcache.device.streams import Mark, Streams


class ReplayedRows:
    """The last replayed pass's hidden states of all layers. Called on the serving thread.

    Args:
        most_rows: of a recorded pass; larger ones are left alone.
        is_prefill: whether the pass that is being recorded is of prefills, and not of decoding.
        may_fork: whether the recording, if there is one, surely goes on to the end of each layer's attention.
    """

    def __init__(
        self,
        streams: Streams,
        num_layers: int,
        width: int,
        most_rows: int,
        dtype: torch.dtype,
        is_prefill: Callable[[], bool],
        may_fork: Callable[[], bool],
    ) -> None:
        self._streams = streams
        self._is_prefill, self._may_fork = is_prefill, may_fork
        self._forked: tuple[Mark, torch.Tensor] | None = None
        """A copy that the pass does not wait for yet, and what it reads, so that nothing else gets that memory."""
        with torch.inference_mode(False):  # else nobody outside of that mode could write to it
            self._rows = torch.zeros(num_layers, most_rows, width, dtype=dtype, device=streams.device)
        # Rows of a recorded pass -> layer -> how often it was recorded: there may be several of a size.
        self._decodes: dict[int, Counter[int]] = {}
        self._prefills: dict[int, Counter[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._rows.nbytes

    def on_layer(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer's attention, (rows, width): copied wherever the pass that is recorded is replayed.

        It must not change before :meth:`end_layer`.
        """
        if not self._streams.is_recording():
            return
        count = len(hidden)
        layers = self._recorded(is_prefill=self._is_prefill()).setdefault(count, Counter())
        if count <= self._rows.shape[1]:
            # Detached: some models are recorded with gradients.
            copy = partial(self._rows[layer, :count].copy_, hidden.detach())
            if self._may_fork():
                self._forked = self._streams.fork(copy), hidden
            else:
                self._streams.inline(copy)
            layers[layer] += 1

    def end_layer(self) -> None:
        """The layer's attention is over, or has failed: what comes next may change its input, or get its memory."""
        forked, self._forked = self._forked, None
        if forked is not None:
            self._streams.hold_up(forked[0])

    def _recorded(self, *, is_prefill: bool) -> dict[int, Counter[int]]:
        """What was recorded of one phase. Where its hooks were not seen, the rows are of the other's last pass."""
        return self._prefills if is_prefill else self._decodes

    def holds(self, count: int, *, is_prefill: bool) -> bool:
        """Whether replaying ``count`` rows, in the next larger recorded pass, leaves the rows of all layers."""
        recorded = self._recorded(is_prefill=is_prefill)
        sizes = [size for size in recorded if size >= count]
        if not sizes:
            return False
        layers = recorded[min(sizes)]
        return len(layers) == len(self._rows) and len(set(layers.values())) == 1

    def layers(self, first: int, count: int) -> torch.Tensor:
        """Rows of layers [first, first + count): (count, most_rows, width), valid until the next pass."""
        return self._rows[first : first + count]
