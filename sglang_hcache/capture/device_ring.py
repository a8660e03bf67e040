"""Rows of a forward pass on their way from a device to host memory, beside the pass [HCache §4.2.2].

The pass copies them into one of a few buffers on the device, which takes microseconds, and goes on; a queue of its own
copies them to the host. The pass waits only where all buffers are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hcache.device.streams import BufferRing, Mark, Streams

NUM_BUFFERS = 4
ROWS_AT_ONCE = 2048


class DeviceRing:
    """Buffers on the device, used in turn. Called on the serving thread.

    Args:
        row_bytes: of the widest row.
        rows_at_once: rows of a buffer.
    """

    def __init__(self, streams: Streams, row_bytes: int, rows_at_once: int = ROWS_AT_ONCE) -> None:
        self._streams = streams
        self._rows_at_once = rows_at_once
        self._buffers = BufferRing(streams.device, NUM_BUFFERS, rows_at_once * row_bytes)

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._buffers.num_bytes

    def take(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Copy rows, as they are at this point of the pass, beside each other into host memory.

        Args:
            parts: each (n, width), on the device.
            into: (n, all widths) of pinned host memory, contiguous; there once :meth:`taken` is reached.
        """
        for first in range(0, len(into), self._rows_at_once):
            rows = slice(first, first + self._rows_at_once)
            self._take([part[rows] for part in parts], into[rows])

    def taken(self) -> Mark:
        """When all rows so far are in host memory."""
        return self._streams.copied()

    def _take(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        on_device, copied = self._buffers.take(into)

        def gather() -> None:
            column = 0
            for part in parts:
                on_device[:, column : column + part.shape[1]].copy_(part)
                column += part.shape[1]

        if copied is not None:
            self._streams.hold_up(copied)
        self._streams.inline(gather)
        self._streams.copy_after(self._streams.fence())
        self._streams.copy(into, on_device)
        self._buffers.give_back(self._streams.copied())
