"""Rows of a forward pass on their way from a device to host memory, beside the pass [HCache §4.2.2].

The pass copies them into one of a few buffers on the device, which takes microseconds, and goes on; a queue of its own
copies them to the host. The pass waits only where all buffers are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from sglang_hcache.capture.sources import RowSource
from sglang_hcache.device.streams import BufferRing, Mark, Streams

NUM_BUFFERS = 4


class DeviceRing:
    """Buffers on the device, used in turn. Called on the serving thread.

    Args:
        buffer_bytes: of each; a row of one layer must fit.
    """

    def __init__(self, streams: Streams, buffer_bytes: int) -> None:
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._buffers = BufferRing(streams.device, NUM_BUFFERS, buffer_bytes)

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._buffers.num_bytes

    def take(self, source: RowSource, into: torch.Tensor) -> None:
        """Copy rows, as they are at this point of the pass, into host memory.

        Args:
            into: (layers, n, width) of pinned host memory, contiguous; there once :meth:`taken` is reached.
        """
        for layers, rows in self._pieces(into):
            self._take(source, layers, rows, into[layers, rows])

    def values(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of ``source``, as it is at this point of the pass, in host memory of its own; there as rows are."""
        kept = torch.empty_like(source)
        self._streams.inline(partial(kept.copy_, source))
        self._streams.copy_after(self._streams.fence())
        return self._streams.download(kept)

    def taken(self) -> Mark:
        """When all that was taken so far is in host memory."""
        return self._streams.copied()

    def _pieces(self, into: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """Layers and rows that fit into a buffer: whole layers if they do, else rows of one."""
        num_layers, num_rows, _ = into.shape
        row_bytes = into.nbytes // (num_layers * num_rows)
        rows_at_once = min(num_rows, self._buffer_bytes // row_bytes)
        layers_at_once = max(1, self._buffer_bytes // (num_rows * row_bytes))
        for layer in range(0, num_layers, layers_at_once):
            for row in range(0, num_rows, rows_at_once):
                yield (
                    slice(layer, min(num_layers, layer + layers_at_once)),
                    slice(row, min(num_rows, row + rows_at_once)),
                )

    def _take(self, source: RowSource, layers: slice, rows: slice, into: torch.Tensor) -> None:
        on_device, copied = self._buffers.take(into.shape, into.dtype)
        if copied is not None:
            self._streams.hold_up(copied)
        self._streams.inline(partial(source, on_device, layers, rows))
        self._streams.copy_after(self._streams.fence())
        self._streams.copy(into, on_device)
        self._buffers.give_back(self._streams.copied())
