"""How the stored rows of one layer become K and V in the pool: the restore side of ``core.layout.Method``."""

from __future__ import annotations

import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.projector import KVPool, Projector, project_layer, write_rows


class LayerRestorer:
    """Restores layers.

    Args:
        dtype: element type of the stored rows.
        pool: where K and V go.
        kv_heads: KV heads of a layer.
        projector: makes K and V of hidden states.
    """

    def __init__(self, dtype: torch.dtype, pool: KVPool, kv_heads: int, projector: Projector) -> None:
        self.dtype = dtype
        self._pool = pool
        self._kv_heads = kv_heads
        self._projector = projector

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
            rows: (n, width) of ``dtype``, as they were captured.
            positions: (n,) int64, position of each row in its sequence.
            slots: (n,) int64.
        """
        if method is Method.KV:
            write_rows(self._pool, layer, rows, slots, self._kv_heads)
        else:
            project_layer(self._projector, self._pool, layer, rows, positions, slots)
