"""Rows from host memory through a few buffers on the device into the KV pool: what ``lanes.py`` is on a CPU.

Copies and computations overlap: while one part of rows is projected, the next one is copied into another buffer. ::

    copies        | part 1 -> A | part 2 -> B |  (A is free)  | part 3 -> A | ...
    computations                | part 1 of A | part 2 of B   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_hcache.device.copies import Spans
from sglang_hcache.device.streams import BufferRing, Mark, Stamp, Streams
from sglang_hcache.restore.behind import PassesBehind, Written
from sglang_hcache.restore.pace import Pace
from sglang_hcache.restore.rows import StoredRows, cut, slices

NUM_BUFFERS = 3
"""One is computed from, one is copied into, and one lies ready."""

_WORTH_BYTES = 32 * 2**20
"""Bytes of rows that are copied together, at least. Asking for a copy and what follows it takes the interpreter 0.2 to
0.3 ms beside a busy scheduler, and the bus 0.6 ms; nobody else gets anything from the bus meanwhile."""
_FEWEST_ROWS, _MOST_ROWS = 2048, 8192

Write = Callable[[StoredRows, torch.Tensor, torch.Tensor], None]
"""Brings rows on the device into slots (n,) at positions (n,), on the current stream."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Memory on the device that restores go through."""

    buffer_bytes: int
    """Of rows that are copied together."""
    product_bytes: int
    """Of what is projected together."""

    @classmethod
    def of(cls, hidden_row_bytes: int, kv_row_bytes: int) -> StageSizes:
        """For rows of both kinds in buffers of one size: more of the narrower ones are copied together.

        Args:
            hidden_row_bytes, kv_row_bytes: of a token in one layer.
        """
        widest = max(hidden_row_bytes, kv_row_bytes)
        buffer_bytes = widest * min(_MOST_ROWS, max(_FEWEST_ROWS, _WORTH_BYTES // widest))
        return cls(buffer_bytes, kv_row_bytes * _rows_of(buffer_bytes, hidden_row_bytes))


def _rows_of(buffer_bytes: int, row_bytes: int) -> int:
    return min(_MOST_ROWS, buffer_bytes // row_bytes)


class QueuedWrite:
    """Rows on their way into the pool; asked like a future."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def done(self) -> bool:
        return self._mark.is_reached()

    def cancel(self) -> bool:
        """A device does what it was asked for."""
        return False

    def result(self) -> None:
        """Wait until K and V are in the pool, and the rows in host memory may change."""
        self._mark.wait()


class DeviceStage:
    """A ring of buffers on the device. Used by one thread at a time.

    Args:
        num_positions: positions [0, num_positions) of sequences are known.
    """

    def __init__(self, streams: Streams, sizes: StageSizes, num_positions: int) -> None:
        self._streams = streams
        self._sizes = sizes
        self.pace = Pace(streams.stamp)
        self.passes = PassesBehind(streams.hold_up)
        self._layers: dict[int, Mark] = {}
        """Layer -> when its last rows are written."""
        self._buffers = BufferRing(streams.device, NUM_BUFFERS, sizes.buffer_bytes)
        with torch.inference_mode(False):  # they outlive the mode that a caller may be in
            self._positions = torch.arange(num_positions, device=streams.device)
            self._products = torch.empty(sizes.product_bytes, dtype=torch.uint8, device=streams.device)
        made_here = streams.fence()
        streams.copy_after(made_here)
        streams.compute_after(made_here)

    @property
    def num_bytes(self) -> int:
        """Device memory that it holds."""
        return self._buffers.num_bytes + self._positions.nbytes + self._products.nbytes

    def rows_at_once(self, row_bytes: int) -> int:
        """Rows of one copy, and of one projection."""
        return _rows_of(self._sizes.buffer_bytes, row_bytes)

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Positions [first, end), int64, on the device.

        Raises:
            IndexError: they are more than the model has.
        """
        if end > len(self._positions):
            raise IndexError(f"position {end - 1} of {len(self._positions)}")
        return self._positions[first:end]

    def products(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """(count, width), the same memory every time: for what one computation leaves to the next."""
        return self._products[: count * width * dtype.itemsize].view(dtype).view(count, width)

    def fence(self) -> Mark:
        """What the calling thread and the model have queued on the device."""
        return self._streams.fence()

    def stamp(self) -> Stamp:
        """When the device has done what the calling thread has queued."""
        return self._streams.stamp()

    def written(self) -> Written:
        """When K and V are in the pool of all that was started so far."""
        return Written(self._streams.computed(), dict(self._layers))

    def after(self, mark: Mark) -> None:
        """Begin with nothing before ``mark``."""
        self._streams.compute_after(mark)
        self._streams.copy_after(mark)

    def host_rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """(count, width) in host memory that the device copies from as fast as it can."""
        ones = torch.ones(count, width, dtype=dtype, device=self._streams.device)
        self._streams.copy_after(self._streams.fence())
        rows = self._streams.download(ones)
        self._streams.copied().wait()
        return rows

    def bring(self, rows: torch.Tensor) -> Mark:
        """Copy rows in host memory, (n, width), into the buffers, for nobody: to measure how long it takes."""
        for part in self._parts(len(rows), rows):
            self._bring(rows, ((part.start, part.stop - part.start),))
            self._buffers.give_back(self._streams.copied())
        return self._streams.copied()

    def start(
        self,
        stored: Sequence[StoredRows],
        positions: torch.Tensor,
        slots: torch.Tensor,
        write: Write,
        before_layer: Callable[[], object],
    ) -> list[QueuedWrite]:
        """Queue copies and ``write`` for layers of the same tokens; what was queued, also if ``before_layer`` raises.

        Args:
            stored: rows in host memory, pinned for speed, or on the device; not changed before the result is there.
            positions, slots: (n,) int64 on the device.
        """
        try:
            with self._streams.computing():
                for of_layer in stored:
                    before_layer()
                    self._queue_layer(of_layer, positions, slots, write)
            return [QueuedWrite(self._streams.computed())]
        except BaseException:
            # Nobody would know what to wait for.
            self._streams.copied().wait()
            self._streams.computed().wait()
            raise

    def _queue_layer(
        self, stored: StoredRows, positions: torch.Tensor, slots: torch.Tensor, write: Write
    ) -> None:
        for part in self._parts(len(slots), stored.memory):
            of_part = stored.part(part.start, part.stop)
            self._queue(of_part, cut(positions, part), cut(slots, part), write)

    def _parts(self, count: int, memory: torch.Tensor) -> Iterator[slice]:
        """Of ``count`` rows as those of ``memory``, (m, width): what is copied together."""
        return slices(count, self.rows_at_once(memory.shape[1] * memory.element_size()))

    def _queue(self, stored: StoredRows, positions: torch.Tensor, slots: torch.Tensor, write: Write) -> None:
        staged = stored.moved(self._bring(stored.memory, stored.spans))
        self._streams.compute_after(self._streams.copied())
        self._streams.compute(lambda: write(staged, positions, slots))
        self._layers[stored.layer] = written = self._streams.computed()
        self._buffers.give_back(written)

    def _bring(self, memory: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Rows of ``memory`` in the next buffer, once all copies so far are done."""
        shape = (sum(count for _, count in spans), memory.shape[1])
        on_device, used = self._buffers.take(shape, memory.dtype)
        if used is not None:
            self._streams.copy_after(used)
        self._streams.copy(on_device, memory, spans)
        return on_device
