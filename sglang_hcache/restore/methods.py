"""How the stored rows of one layer become K and V in the pool: the restore side of ``core.layout.Method``."""

from __future__ import annotations

import torch

from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.device.projector import KVPool, Projector, project_layer, write_rows


class LayerRestorer:
    """Restores layers, each by the method that the layout names.

    Args:
        layout: what is stored of each layer.
        dtype: element type of the stored rows.
        pool: where K and V go.
        kv_heads: KV heads of a layer.
        projector: for layers stored as hidden states; None if there are none.
    """

    def __init__(
        self,
        layout: StateLayout,
        dtype: torch.dtype,
        pool: KVPool,
        kv_heads: int,
        projector: Projector | None,
    ) -> None:
        if projector is None and Method.HIDDEN in layout.methods:
            raise ValueError("layers stored as hidden states need a projector")
        self.layout = layout
        self.dtype = dtype
        self._pool = pool
        self._kv_heads = kv_heads
        self._projector = projector

    def restore(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V of ``layer`` to ``slots``.

        Args:
            rows: (n, width) of ``dtype``, as they were captured.
            positions: (n,) int64, position of each row in its sequence.
            slots: (n,) int64.
        """
        if self.layout.methods[layer] is Method.KV:
            write_rows(self._pool, layer, rows, slots, self._kv_heads)
        else:
            assert self._projector is not None
            project_layer(self._projector, self._pool, layer, rows, positions, slots)
