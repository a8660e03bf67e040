"""K and V rows into the KV pool on a GPU: norm, rotation and scatter in one pass over memory.

What ``kv_rows.c`` is on a CPU. Tested on a CPU with Triton's interpreter, and by hand on a GPU
(``docs/gpu-development.md``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton

from sglang_hcache.device.key_steps import KeySteps
from sglang_hcache.device.triton_kernels import HEAD_NORM, NO_NORM, ROW_NORM, finish_rows
from sglang_hcache.device.triton_launch import Launches

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEAD_DIM = 1024
_VALUES_AT_ONCE = 2048
"""Values of a token's row, in each tensor that a program holds: 16 for each of 128 threads."""
_VALUES_OF_A_WARP = 256
"""Eight a thread: 16 bytes of a half type."""


class TritonRows:
    """Writes rows to the pool's buffers, on the current stream. A :class:`~.row_writers.RowWriter`."""

    fuses_norm: ClassVar[bool] = True

    def __init__(self) -> None:
        self._launches: dict[tuple[object, ...], Launches] = {}

    def can_finish(self, steps: KeySteps, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in _DTYPES and head_dim <= _MOST_HEAD_DIM

    def finish(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: KeySteps,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        count = slots.shape[0]
        if not count:
            return  # a grid of no programs is an error
        norm, rotation = steps.norm, steps.rotation
        key_pool, value_pool = pools
        _, heads, head_dim = key_pool.shape
        # A pointer that nothing is read from stands for what is not there.
        table = key if rotation is None else rotation.table
        weight = key if norm is None else norm.weight
        num_positions = 0 if rotation is None else table.shape[0]
        epsilon = 0.0 if norm is None else norm.epsilon
        self._launches_of(steps, heads, head_dim)(
            (count, 1, 1),
            (key, value, table, positions, slots, weight, key_pool, value_pool),
            (key.stride(0), value.stride(0), num_positions, epsilon),
        )

    def _launches_of(self, steps: KeySteps, heads: int, head_dim: int) -> Launches:
        """Found once: to work out the constants takes as long as to launch the kernel."""
        norm, rotation = steps.norm, steps.rotation
        kind = (
            norm and (norm.size, norm.rounds_before_weight),
            rotation and (rotation.dim, rotation.pairs_halves, rotation.rounds_products),
            heads,
            head_dim,
        )
        found = self._launches.get(kind)
        if found is None:
            constants = constants_of(steps, heads, head_dim)
            found = self._launches[kind] = Launches(finish_rows, constants)
        return found


def constants_of(steps: KeySteps, heads: int, head_dim: int) -> dict[str, Any]:
    """What the kernel is compiled for, and how.

    Raises:
        ValueError: a norm that is neither one of each head nor one of K's whole row.
    """
    norm, rotation = steps.norm, steps.rotation
    if norm is not None and norm.size not in (head_dim, heads * head_dim):
        raise ValueError(f"a norm of {norm.size} values for {heads} heads of {head_dim}")
    kind = NO_NORM if norm is None else HEAD_NORM if norm.size == head_dim else ROW_NORM
    dim = 0 if rotation is None else rotation.dim
    pairs, rest = triton.next_power_of_2(max(dim // 2, 1)), triton.next_power_of_2(max(head_dim - dim, 1))
    at_once = min(triton.next_power_of_2(heads), max(1, _VALUES_AT_ONCE // max(pairs, rest)))
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": dim,
        "PAIRS_HALVES": rotation is None or rotation.pairs_halves,
        "ROUNDS_PRODUCTS": rotation is not None and rotation.rounds_products,
        "NORM": kind,
        "ROUNDS_FIRST": norm is not None and norm.rounds_before_weight,
        "AT_ONCE": at_once,
        "PAIRS": pairs,
        "REST": rest,
        "BLOCK": min(_VALUES_AT_ONCE, triton.next_power_of_2(heads * head_dim)),
        "num_warps": min(4, max(1, at_once * max(pairs, rest) // _VALUES_OF_A_WARP)),
        # A product that must be rounded before it is added must not be kept exact in a fused operation.
        "enable_fp_fusion": rotation is None or not rotation.rounds_products,
    }
