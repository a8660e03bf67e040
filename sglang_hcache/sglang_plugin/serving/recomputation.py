"""The first layers of a restore, computed from tokens by the model itself [HCache §4.1]."""

from __future__ import annotations

import time
from array import array

import torch

from sglang_hcache.sglang_plugin.seam.protocols import ForwardModel


class Recomputation:
    """Runs the tokens ``[start, end)`` through the first layers, a piece at a time, on the scheduler's thread.

    Args:
        tokens: the prompt, at least ``end`` tokens.
        slots: (end,) int64, one a token from the prompt's beginning; those before ``start`` hold the device's prefix.
        num_layers: how many layers to compute.
    """

    def __init__(
        self, forward: ForwardModel, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int
    ) -> None:
        self._forward = forward
        self._tokens = tokens
        self._slots = slots
        self._num_layers = num_layers
        self._done = start
        self._stopped = False
        self.ended = 0.0
        """When it was over, by ``time.monotonic``."""
        self.seconds = 0.0
        """Spent computing."""

    @property
    def is_complete(self) -> bool:
        return self._done == len(self._slots)

    @property
    def is_over(self) -> bool:
        """Whether it touches the slots no more."""
        return self._stopped or self.is_complete

    def stop(self) -> None:
        """Compute nothing more."""
        self._stopped = True

    def advance(self, most_tokens: int) -> None:
        """Compute the next piece, of at most ``most_tokens`` tokens."""
        end = min(self._done + most_tokens, len(self._slots))
        self.seconds += self._forward.extend(
            self._tokens[:end], self._slots[:end], self._done, self._num_layers
        )
        self._done = end
        self.ended = time.monotonic()
