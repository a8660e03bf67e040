"""The bytes of the host tier: layer-major, so that a layer's rows of neighbouring slots are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.layout import StateLayout


class SlotMemory:
    """Slots of one chunk each. It says nothing of which are in use.

    Args:
        memory: uint8, 1-D, ``layout.chunk_bytes`` for each slot.
        layout: what a slot holds.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], layout: StateLayout) -> None:
        if memory.ndim != 1 or memory.size % layout.chunk_bytes:
            raise ValueError(
                f"memory of shape {memory.shape} does not hold chunks of {layout.chunk_bytes} bytes"
            )
        self.memory = memory
        self.layout = layout
        self.num_slots = memory.size // layout.chunk_bytes
        self._layers = [self.layers(layer, 1)[0] for layer in range(layout.num_layers)]

    def read_layer(self, slots: Sequence[int], layer: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy one layer of pinned ``slots`` into ``out``, uint8 of shape (len(slots), chunk bytes of the layer)."""
        np.take(self._layers[layer], slots, axis=0, out=out, mode="clip")

    def layer_of(self, slot: int, layer: int) -> npt.NDArray[np.uint8]:
        """One layer of a slot, a view: uint8, 1-D."""
        rows: npt.NDArray[np.uint8] = self._layers[layer][slot]
        return rows

    def layer(self, layer: int) -> npt.NDArray[np.uint8]:
        """One layer of all slots, a view: uint8, (slots, chunk bytes of the layer)."""
        rows: npt.NDArray[np.uint8] = self._layers[layer]
        return rows

    def layers(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` layers of equal rows from ``first`` on, a view: uint8, (layers, slots, chunk bytes of a layer)."""
        size = self.layout.chunk_layer_bytes[first]
        begin = self.num_slots * self.layout.layer_offset(first)
        return self.memory[begin : begin + self.num_slots * count * size].reshape(count, self.num_slots, size)
