"""Promotion: chunks that are restored from the disk again and again come to host memory, where they are faster.

A chunk is promoted when it is restored from the disk for the second time: what returns once only, as most
conversations of a day do, takes nobody's place. Its bytes are copied as they are read, after their digests matched;
nothing is read for it, and nothing is written to make room.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.observer import Observer
from sglang_hcache.tier.host import HostTier

_MOST_REMEMBERED = 2**17  # names of chunks: 20 MB


class Promoter:
    """Remembers what was restored from the disk: as many chunks as host memory has slots."""

    def __init__(self, host: HostTier, observer: Observer) -> None:
        self._host = host
        self._observer = observer
        self._most = min(host.num_slots, _MOST_REMEMBERED)
        self._lock = threading.Lock()
        self._restored: OrderedDict[ChunkKey, None] = OrderedDict()

    def begin(self, keys: Sequence[ChunkKey]) -> Promotion | None:
        """The chunks ``keys`` are about to be read from the disk; None if none of them is to be promoted.

        The caller closes it.
        """
        with self._lock:
            wanted = {index: key for index, key in enumerate(keys) if key in self._restored}
            for key in reversed(keys):  # the tail is forgotten before the head
                self._restored[key] = None
                self._restored.move_to_end(key)
            while len(self._restored) > self._most:
                self._restored.popitem(last=False)
        return Promotion(self._host, self._observer, wanted) if wanted else None


class Promotion:
    """Chunks on their way from the disk into host slots. Every method is safe from any thread.

    Args:
        wanted: which chunks, by their places among those that are read.
    """

    def __init__(self, host: HostTier, observer: Observer, wanted: Mapping[int, ChunkKey]) -> None:
        self._host = host
        self._observer = observer
        self._wanted = wanted
        self._generation = host.generation
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}  # by place
        self._has_begun = False
        self.copied_s = 0.0
        """Seconds that copies took, of all threads together."""
        self._layers_left = host.layout.num_layers
        self._copying = 0
        self._is_closed = False

    def take(self, layers: Mapping[int, npt.NDArray[np.uint8]], num_chunks: int) -> None:
        """Copy layers that were read and verified. With the last one the chunks are in host memory.

        Args:
            layers: layer -> uint8, 1-D, of all ``num_chunks`` chunks that are read. No layer comes twice.
        """
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                self._slots = self._reserve()
            self._copying += 1
        num_copied, began = 0, time.monotonic()
        try:
            for layer, rows in layers.items():
                self._copy(layer, rows.reshape(num_chunks, -1))
                num_copied += 1
        finally:
            with self._lock:
                self._copying -= 1
                self.copied_s += time.monotonic() - began
                self._layers_left -= num_copied
                if not self._layers_left:
                    self._publish()
                self._release_if_over()

    def _copy(self, layer: int, rows: npt.NDArray[np.uint8]) -> None:
        for place, slot in self._slots.items():
            np.copyto(self._host.layer_of(slot, layer), rows[place])

    def close(self) -> None:
        """No more layers come: slots that are not whole are free again. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._release_if_over()

    def _reserve(self) -> dict[int, int]:
        """Slots for the first of the chunks, as far as there are some that nobody needs more."""
        slots: dict[int, int] = {}
        slot = None
        for place in self._wanted:
            slot = self._host.reserve(slot)
            if slot is None:
                break
            slots[place] = slot
        return slots

    def _publish(self) -> None:
        for place, slot in reversed(self._slots.items()):  # the tail is evicted before the head
            if self._host.publish(slot, self._wanted[place], self._generation):
                self._observer.count("host.chunks_promoted")
        self._slots = {}

    def _release_if_over(self) -> None:
        if self._is_closed and not self._copying:
            for slot in self._slots.values():
                self._host.release(slot)
            self._slots = {}
