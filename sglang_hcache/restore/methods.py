"""How the stored rows of one layer become K and V in the pool: the restore side of ``core.layout.Method``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.kv_rows import KVRows
from sglang_hcache.device.projector import KVPool, Projector, UnfinishedProjector
from sglang_hcache.device.row_writers import LayerWriter, RowWriter
from sglang_hcache.device.streams import Mark
from sglang_hcache.restore.behind import Written
from sglang_hcache.restore.lanes import Lanes
from sglang_hcache.restore.rows import StoredRows, Writing, cut, slices
from sglang_hcache.restore.stage import DeviceStage

ROWS_AT_ONCE = 2048
"""Rows of one projection on a CPU: bounds its temporaries."""


@dataclass(slots=True, eq=False)
class LayerRestorer:
    """Restores layers.

    Args:
        dtype: element type of the stored rows.
        pool: where K and V go.
        kv_heads: KV heads of a layer.
        projector: makes K and V of hidden states; None: there are none to restore.
        rows: finishes rows and writes them to the pool quickly. What it does not take, and all where it is None,
            torch's operations do.
        lanes: who does it on a CPU; None: who asks for it.
        stage: how rows come to a GPU; then no lanes.
        layers: writes K and V that come through ``stage``, of several layers at once.
    """

    dtype: torch.dtype
    pool: KVPool
    kv_heads: int
    projector: Projector | None
    rows: RowWriter | None = None
    lanes: Lanes | None = None
    stage: DeviceStage | None = None
    layers: LayerWriter | None = None
    _unfinished: UnfinishedProjector | None = field(init=False)
    _local: threading.local = field(init=False, default_factory=threading.local)

    def __post_init__(self) -> None:
        assert (self.stage is None) == (self.layers is None)
        self._unfinished = self.projector if isinstance(self.projector, UnfinishedProjector) else None

    def restore(self, stored: Sequence[StoredRows], positions: torch.Tensor, slots: torch.Tensor) -> None:
        """:meth:`start`, after all that the calling thread has asked for, and wait."""
        self.after(self.fence())
        for part in self.start(stored, positions, slots):
            part.result()

    def start(
        self,
        stored: Sequence[StoredRows],
        positions: torch.Tensor,
        slots: torch.Tensor,
        before_layer: Callable[[], object] = lambda: None,
    ) -> Sequence[Writing]:
        """Begin to write K and V of some layers to ``slots``; what is not done yet.

        Args:
            stored: of the same n tokens in the same spans, of ``dtype``; not changed before all is done.
            positions: (n,) int64, position of each token in its sequence, as :meth:`positions` has them.
            slots: (n,) int64.
            before_layer: called from time to time, on any thread; an error that it raises ends the work.
        """
        if self.stage is not None:
            write = partial(self._write, check=before_layer)
            return self.stage.start(stored, positions, slots, write, before_layer)
        places = stored[0].places

        def work(first: int, end: int) -> None:
            tokens = [each[first:end] for each in (places, positions, slots)]
            for part in slices(end - first, ROWS_AT_ONCE):
                of_part = [each[part] for each in tokens]
                for of_layer in stored:
                    before_layer()
                    self._write_from(of_layer, *of_part)

        if self.lanes is not None:
            return self.lanes.start(work, len(slots))
        work(0, len(slots))
        return []

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Positions [first, end), int64, where :meth:`start` wants them."""
        return torch.arange(first, end) if self.stage is None else self.stage.positions(first, end)

    def fence(self) -> Mark | None:
        """What the calling thread and the model have asked the device for so far; None where that is done."""
        return None if self.stage is None else self.stage.fence()

    def written(self) -> Written | None:
        """When a GPU has written all that it was asked for so far; None: the CPU writes."""
        return None if self.stage is None else self.stage.written()

    def after(self, mark: Mark | None) -> None:
        """Write nothing into the pool, and read no rows, before ``mark``."""
        if mark is not None and self.stage is not None:
            self.stage.after(mark)

    def _write_from(
        self, stored: StoredRows, places: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """On a CPU, the rows ``places`` of its memory."""
        layer, is_kv = stored.layer, stored.method is Method.KV
        if is_kv and isinstance(self.rows, KVRows):
            self.rows.store(stored.memory, places, slots, self.pool.buffers(layer))
        elif is_kv:
            rows = self._side_by_side(stored.memory, places)
            key, value = rows.view(len(rows), 2, self.kv_heads, -1).unbind(1)
            self.pool.write(layer, slots, key, value)
        else:
            self._project(layer, self._side_by_side(stored.memory, places), positions, slots)

    def _side_by_side(self, memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows ``places`` of ``memory``: copied, unless they lie so."""
        if bool((places.diff() == 1).all()):
            return memory[int(places[0]) :][: len(places)]
        rows = self._scratch("rows", len(places), memory.shape[1])
        return torch.index_select(memory, 0, places, out=rows)

    def _write(
        self,
        stored: StoredRows,
        positions: torch.Tensor,
        slots: torch.Tensor,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        layer, rows = stored.layer, stored.rows
        if stored.method is Method.KV:
            assert self.layers is not None
            self.layers(rows, layer, slots)
            return
        assert self.stage is not None
        for part in self.stage.pace.parts(len(rows), check):
            self._project(layer, cut(rows, part), cut(positions, part), cut(slots, part))

    def _project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        projector, rows = self._unfinished, self.rows
        if rows is not None and projector is not None:
            pools = self.pool.buffers(layer)
            _, heads, head_dim = pools[0].shape
            steps = projector.key_steps(layer, self.dtype, with_norm=rows.fuses_norm)
            if steps is not None and rows.can_finish(steps, self.dtype, head_dim):
                width = 2 * heads * head_dim
                if self.stage is None:
                    out = self._scratch("products", len(hidden), width)
                else:
                    out = self.stage.products(len(hidden), width, self.dtype)
                leave_norm = steps.norm is not None
                key, value = projector.project_unrotated(layer, hidden, out, leave_norm=leave_norm)
                rows.finish(key, value, steps, positions, slots, pools)
                return
        assert self.projector is not None, "hidden states are stored, and nothing projects them"
        self.pool.write(layer, slots, *self.projector.project(layer, hidden, positions))

    def _scratch(self, name: str, count: int, width: int) -> torch.Tensor:
        """(count, width) on a CPU, for each thread the same memory every time: to touch new pages takes as long as a
        product.
        """
        scratch: torch.Tensor | None = getattr(self._local, name, None)
        if scratch is None or scratch.numel() < count * width:
            with torch.inference_mode(False):  # else nobody outside of that mode could write to it
                scratch = torch.empty(ROWS_AT_ONCE * width, dtype=self.dtype)
            setattr(self._local, name, scratch)
        return scratch[: count * width].view(count, width)
