"""What finishes K and V rows of a layer and writes them, and which one a device has."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from sglang_hcache.device.key_steps import KeySteps
from sglang_hcache.device.projector import KVPool


class RowWriter(Protocol):
    """Finishes rows and writes them into the KV pool, without memory of its own."""

    fuses_norm: ClassVar[bool]
    """Whether :meth:`finish` does the norm as well; where not, it is to be done before."""

    def can_finish(self, steps: KeySteps, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether :meth:`finish` takes these steps, for rows of ``dtype`` with heads of ``head_dim``."""

    def finish(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: KeySteps,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Do the steps to ``key``, then write both rows to ``slots``.

        Args:
            key, value: (n, kv_heads * head_dim) of one dtype, with all biases; columns contiguous.
            steps: that :meth:`can_finish` allows.
            positions, slots: (n,) int64, contiguous.
            pools: K and V, each (slots, kv_heads, head_dim) of the same dtype, contiguous.
        """


class LayerWriter(Protocol):
    """Writes K and V of several layers into the KV pool at once, as they are."""

    def __call__(self, rows: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        """Write to ``slots``, (n,) int64, contiguous, in neighbouring layers from ``first`` on.

        Args:
            rows: (layers * n, 2 * kv_heads * head_dim) of the pool's dtype, contiguous: layer by layer, K, then V.
        """


def load_row_writer(*, is_cpu: bool) -> RowWriter | None:
    """The one for this device; None where torch's operations must do (no C compiler)."""
    # Imported where they are used: Triton is slow to import, and a CPU has no use for it.
    if is_cpu:
        from sglang_hcache.device.kv_rows import KVRows

        return KVRows.load()
    from sglang_hcache.device.triton_rows import TritonRows

    return TritonRows()


def load_layer_writer(pool: KVPool, num_layers: int) -> LayerWriter:
    """The one for a GPU."""
    from sglang_hcache.device.triton_layers import TritonScatter

    return TritonScatter([pool.buffers(layer) for layer in range(num_layers)])
