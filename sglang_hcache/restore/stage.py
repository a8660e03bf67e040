"""Rows from host memory through a few buffers on the device into the KV pool: what ``lanes.py`` is on a CPU.

Copies and computations overlap: while one part of rows is projected, the next one is copied into another buffer. ::

    copies        | part 1 -> A | part 2 -> B |  (A is free)  | part 3 -> A | ...
    computations                | part 1 of A | part 2 of B   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.streams import BufferRing, Mark, Stamp, Streams
from sglang_hcache.restore.behind import PassesBehind, Written
from sglang_hcache.restore.pace import Pace
from sglang_hcache.restore.rows import StoredRows, cut, slices

NUM_BUFFERS = 3
"""One is computed from, one is copied into, and one lies ready."""

_WORTH_BYTES = 32 * 2**20
"""Bytes of rows that may be copied together, at least: where a layer has fewer, K and V of several. Asking for a copy
and what follows it takes the interpreter 0.2 to 0.3 ms beside a busy scheduler, and the bus 0.6 ms; nobody else gets
anything from the bus meanwhile."""
_FEWEST_ROWS, _MOST_ROWS = 2048, 8192

Write = Callable[[StoredRows, torch.Tensor, torch.Tensor], None]
"""Brings rows on the device into slots (n,) at positions (n,), on the current stream. K and V are (layers * n) rows, of
neighbouring layers."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Memory on the device that restores go through."""

    buffer_bytes: int
    """Of rows that are copied together."""
    product_bytes: int
    """Of what is projected together."""

    @classmethod
    def of(cls, hidden_row_bytes: int, kv_row_bytes: int) -> StageSizes:
        """For rows of both kinds in buffers of one size.

        Args:
            hidden_row_bytes, kv_row_bytes: of a token in one layer.
        """
        widest = max(hidden_row_bytes, kv_row_bytes)
        buffer_bytes = max(_WORTH_BYTES, widest * _FEWEST_ROWS)
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
        """Rows of a layer in one copy, and in one projection."""
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

    def bring(self, stored: Sequence[StoredRows]) -> Mark:
        """Copy rows in host memory as :meth:`start` does, but for nobody: to measure how long it takes."""
        for group in self._groups(stored):
            for part in self._parts(group[0]):
                self._bring([of_layer.part(part.start, part.stop) for of_layer in group])
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
            before_layer: called before each copy of a layer, or of several.
        """
        try:
            with self._streams.computing():
                for group in self._groups(stored):
                    before_layer()
                    for part in self._parts(group[0]):
                        of_part = [of_layer.part(part.start, part.stop) for of_layer in group]
                        self._queue(of_part, cut(positions, part), cut(slots, part), write)
            return [QueuedWrite(self._streams.computed())]
        except BaseException:
            # Nobody would know what to wait for.
            self._streams.copied().wait()
            self._streams.computed().wait()
            raise

    def _groups(self, stored: Sequence[StoredRows]) -> list[list[StoredRows]]:
        """What is copied at once: neighbouring layers of K and V that fit into a buffer, others one by one."""
        groups: list[list[StoredRows]] = []
        for of_layer in stored:
            if groups and self._fits(of_layer, groups[-1]):
                groups[-1].append(of_layer)
            else:
                groups.append([of_layer])
        return groups

    def _fits(self, stored: StoredRows, group: Sequence[StoredRows]) -> bool:
        """Whether it follows in the pool, lies like the others, and there is room."""
        last = group[-1]
        return (
            stored.method is last.method is Method.KV
            and stored.layer == last.layer + 1
            and stored.spans == last.spans
            and (len(group) + 1) * len(stored) * stored.row_bytes <= self._sizes.buffer_bytes
        )

    def _parts(self, stored: StoredRows) -> Iterator[slice]:
        """What is copied together, of its tokens."""
        return slices(len(stored), self.rows_at_once(stored.row_bytes))

    def _queue(
        self, group: Sequence[StoredRows], positions: torch.Tensor, slots: torch.Tensor, write: Write
    ) -> None:
        staged = group[0].moved(self._bring(group))
        self._streams.compute_after(self._streams.copied())
        self._streams.compute(lambda: write(staged, positions, slots))
        written = self._streams.computed()
        for of_layer in group:
            self._layers[of_layer.layer] = written
        self._buffers.give_back(written)

    def _bring(self, group: Sequence[StoredRows]) -> torch.Tensor:
        """Rows of some layers, one behind the other, in the next buffer, once all copies so far are done."""
        first = group[0]
        shape = (len(group) * len(first), first.memory.shape[1])
        on_device, used = self._buffers.take(shape, first.memory.dtype)
        if used is not None:
            self._streams.copy_after(used)
        self._streams.copy_rows(on_device, [of_layer.memory for of_layer in group], first.spans)
        return on_device
