"""How the stored rows of one layer become K and V in the pool: the restore side of ``core.layout.Method``."""

from __future__ import annotations

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.kv_rows import KVRows
from sglang_hcache.device.projector import KVPool, Projector, UnrotatedProjector

_ROWS_AT_ONCE = 4096  # bounds the temporaries of one projection


class LayerRestorer:
    """Restores layers.

    Args:
        dtype: element type of the stored rows.
        pool: where K and V go.
        kv_heads: KV heads of a layer.
        projector: makes K and V of hidden states; None: there are none to restore.
        rows: writes rows to the pool quickly; None where there is no such thing: on a GPU, or without a compiler.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        pool: KVPool,
        kv_heads: int,
        projector: Projector | None,
        rows: KVRows | None = None,
    ) -> None:
        self.dtype = dtype
        self._pool = pool
        self._kv_heads = kv_heads
        self.projector = projector
        self._rows = rows
        self._products = torch.empty(0, dtype=dtype)

    def with_projector(self, projector: Projector | None) -> LayerRestorer:
        """The same, but for its projector."""
        return LayerRestorer(self.dtype, self._pool, self._kv_heads, projector, self._rows)

    def restore(
        self,
        layer: int,
        method: Method,
        rows: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of ``layer`` to ``slots``.

        Args:
            method: what the rows are: ``HIDDEN`` or ``KV``.
            rows: (n, width) of ``dtype``, contiguous, as they were captured.
            positions: (n,) int64, position of each row in its sequence.
            slots: (n,) int64.
        """
        if method is Method.KV:
            self._store(layer, rows, slots)
            return
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            block = slice(first, first + _ROWS_AT_ONCE)
            self._project(layer, rows[block], positions[block], slots[block])

    def _project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        projector, rows = self.projector, self._rows
        assert projector is not None, "hidden states are stored, and nothing projects them"
        if rows is not None and isinstance(projector, UnrotatedProjector):
            pools = self._pool.buffers(layer)
            _, heads, head_dim = pools[0].shape
            table = projector.rotation_table(layer, self.dtype)
            if table is not None and rows.can_rotate(self.dtype, head_dim):
                out = self._scratch(len(hidden), 2 * heads * head_dim)
                key, value = projector.project_unrotated(layer, hidden, out)
                rows.rotate_and_store(key, value, table, positions, slots, pools)
                return
        self._pool.write(layer, slots, *projector.project(layer, hidden, positions))

    def _scratch(self, count: int, width: int) -> torch.Tensor:
        """(count, width), the same memory each time: the first touch of new pages takes as long as the product."""
        if self._products.numel() < count * width:
            with torch.inference_mode(False):  # else nobody outside of that mode could write to it
                self._products = torch.empty(_ROWS_AT_ONCE * width, dtype=self.dtype)
        return self._products[: count * width].view(count, width)

    def _store(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        if self._rows is not None:
            self._rows.store(rows, slots, self._pool.buffers(layer))
            return
        key, value = rows.view(len(rows), 2, self._kv_heads, -1).unbind(1)
        self._pool.write(layer, slots, key, value)
