"""K and V rows into the KV pool on a CPU and out of it, in one pass over memory. Built from ``kv_rows.c`` at start.

Works on the calling thread, which leaves the interpreter free meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from importlib import resources
from typing import ClassVar

import torch

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device.compiled import ensure_library
from sglang_hcache.device.key_steps import KeySteps

logger = logging.getLogger(__name__)

_LIBRARY = "kv_rows.so"
# No contraction: a product that is not rounded before it is added would give other bits than the model's operations.
_MOST_HEAD_DIM = 1024
_OPTIONS = ("-shared", "-fPIC", "-O3", "-march=native", "-ffp-contract=off", f"-DMOST_DIM={_MOST_HEAD_DIM}")
_ROTATIONS = {torch.bfloat16: "rotate_and_store_bf16", torch.float32: "rotate_and_store_f32"}

_Int = ctypes.c_int64


def load_library() -> ctypes.CDLL:
    """Build the library, or find it built.

    Raises:
        ConfigError, OSError: neither is possible.
    """
    source = resources.files(__package__).joinpath("kv_rows.c").read_text(encoding="utf-8")
    return ctypes.CDLL(str(ensure_library("kv-rows", _LIBRARY, source, _OPTIONS) / _LIBRARY))


class KVRows:
    """Writes rows to the pool's buffers. A :class:`~.row_writers.RowWriter`.

    Args:
        library: built from ``kv_rows.c``.
    """

    fuses_norm: ClassVar[bool] = False

    def __init__(self, library: ctypes.CDLL) -> None:
        # To look one up takes a quarter of the time that a call for few rows does.
        self._store = library["store_rows"]
        self._rotations = {dtype: library[name] for dtype, name in _ROTATIONS.items()}

    @classmethod
    def load(cls) -> KVRows | None:
        """With its library; None, with a line in the log, where there can be none."""
        try:
            return cls(load_library())
        except (ConfigError, OSError) as error:
            logger.warning("hcache: saving and restoring are slower than they could be: %s", error)
            return None

    def can_finish(self, steps: KeySteps, dtype: torch.dtype, head_dim: int) -> bool:
        """True for the rotation of whole heads, in halves, that torch's operations do."""
        rotation = steps.rotation
        return (
            steps.norm is None
            and rotation is not None
            and rotation.pairs_halves
            and rotation.rounds_products
            and rotation.table.dtype == dtype
            and rotation.dim == head_dim <= _MOST_HEAD_DIM
            and dtype in _ROTATIONS
        )

    def finish(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: KeySteps,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """As in the protocol.

        Raises:
            IndexError: a position that the table does not have.
        """
        assert steps.rotation is not None
        table = steps.rotation.table
        if int(positions.max()) >= len(table):
            raise IndexError(f"position {int(positions.max())} is not in the table of {len(table)}")
        key_pool, value_pool = pools
        _, heads, head_dim = key_pool.shape
        arguments = (
            *(_address(key), _Int(key.stride(0)), _address(value), _Int(value.stride(0))),
            *(_address(each) for each in (table, positions, slots, key_pool, value_pool)),
            *(_Int(heads), _Int(head_dim)),
        )
        self._rotations[key.dtype](*arguments, _Int(len(slots)))

    def store(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Write rows of K and V side by side to ``slots``, as they are.

        Args:
            rows: (any number, 2 * kv_heads * head_dim), contiguous, K first.
            places: (n,) int64, contiguous: which of them, in the order of ``slots``, which are as many.
            pools: as for :meth:`finish`; of the rows' dtype.
        """
        row_bytes = rows.shape[1] // 2 * rows.element_size()
        arguments = (_address(each) for each in (rows, places, slots, *pools))
        self._store(*arguments, _Int(row_bytes), _Int(len(slots)))


class GatheredRows:
    """Reads rows of the pool, any number of layers in one call. A :class:`~.kv_gather.KVGather`.

    Args:
        library: built from ``kv_rows.c``.
        pools: memory of K and V of each layer, (slots, kv_heads, head_dim) each, contiguous; it stays where it is.
    """

    def __init__(self, library: ctypes.CDLL, pools: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._gather = library["gather_rows"]
        self._pools = pools  # their memory lives as long as this
        addresses = ctypes.c_void_p * len(pools)
        self._keys, self._values = (
            addresses(*(pool[which].data_ptr() for pool in pools)) for which in (0, 1)
        )

    def __call__(self, into: torch.Tensor, first: int, slots: torch.Tensor) -> None:
        num_layers, num_rows, width = into.shape
        assert slots.dtype is torch.int64
        assert first + num_layers <= len(self._pools)
        begin = first * ctypes.sizeof(ctypes.c_void_p)
        self._gather(
            _address(into),
            *(ctypes.byref(pools, begin) for pools in (self._keys, self._values)),
            _address(slots),
            *map(_Int, (width // 2 * into.element_size(), num_layers, num_rows)),
        )


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
