"""Copies of rows that lie apart, as CUDA's runtime makes them: many in one call, or one by one.

They take addresses: to make a view in torch takes several times as long as the bus takes for such a copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.errors import ConfigError

_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses say where they are
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BESIDE_COMPUTATIONS = 1  # cudaMemcpyFlagPreferOverlapWithCompute
_BATCHES_SINCE = 13
"""CUDA's version. In 12.8 and 12.9 ``cudaMemcpyBatchAsync`` has one argument more."""

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Rows [first, first + count)."""
Numbers: TypeAlias = npt.NDArray[np.uint64]
Memcpy: TypeAlias = Callable[[int, int, int, int, int], int]
"""``cudaMemcpyAsync``: target, source, bytes, kind, stream -> error."""
MemcpyBatch: TypeAlias = Callable[[int, int, int, int, int, int, int, int], int]
"""``cudaMemcpyBatchAsync``: where targets, sources and bytes stand, and how many; where attributes stand, and the first
copy that each is for, and how many; stream -> error."""

logger = logging.getLogger(__name__)


class PieceCopies(Protocol):
    """Queues copies of pieces of memory. Used by one thread."""

    def __call__(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        """In any order among each other.

        Args:
            targets, sources: addresses.
            sizes: bytes, none 0.

        Raises:
            RuntimeError: CUDA's error.
        """


class OneByOne:
    """A call for each piece: 5 to 10 microseconds of the CPU beside an H200."""

    def __init__(self, memcpy: Memcpy) -> None:
        self._memcpy = memcpy

    def __call__(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            error = self._memcpy(target, source, size, _ANY_DIRECTION, stream)
            if error:
                raise RuntimeError(f"cudaMemcpyAsync: error {error}")


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``. The hints are for memory that CUDA moves by itself, and we have none."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Batches:
    """One call for all pieces. Where it never worked and copies one by one do, those are made from then on.

    Args:
        forget_error: makes CUDA forget the thread's last error, which torch would raise in whatever comes next.
    """

    def __init__(
        self, batch: MemcpyBatch, one_by_one: PieceCopies, forget_error: Callable[[], object]
    ) -> None:
        self._batch: MemcpyBatch | None = batch
        self._one_by_one = one_by_one
        self._forget_error = forget_error
        self._has_worked = False
        self._attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATIONS)
        self._first_copy = ctypes.c_size_t(0)  # that the attributes are for

    def __call__(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int) -> None:
        if self._batch is None or len(sizes) == 1:
            self._one_by_one(targets, sources, sizes, stream)
            return
        error = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(self._attributes), ctypes.addressof(self._first_copy), 1, stream,
        )  # fmt: skip
        if not error:
            self._has_worked = True
            return
        self._forget_error()
        if self._has_worked:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {error}")
        if self._attributes.flags:
            self._attributes.flags = 0  # it is only a hint
            self(targets, sources, sizes, stream)
            return
        # No number says that the platform is the reason. That other copies of the same pieces work does.
        self._one_by_one(targets, sources, sizes, stream)
        self._batch = None
        logger.warning(
            "hcache: cudaMemcpyBatchAsync does not work here (error %d). So chunks that do not lie side by side in "
            "host memory are copied one by one, and restores of them are slower",
            error,
        )


def copy_spans(
    copies: PieceCopies, into: torch.Tensor, sources: Sequence[torch.Tensor], spans: Spans, stream: int
) -> None:
    """Queue copies of the same rows of each source, one behind the other into ``into``, in one call.

    Args:
        sources: of the same width and dtype.
        spans: at least one; none is empty.

    Raises:
        RuntimeError: CUDA's error.
    """
    row_bytes = sources[0].stride(0) * sources[0].element_size()
    first, count = np.array(spans, dtype=np.uint64).T
    begins = np.array([source.data_ptr() for source in sources], dtype=np.uint64)
    addresses = (begins[:, None] + first * row_bytes).ravel()
    sizes = np.tile(count * row_bytes, len(sources))
    copies(into.data_ptr() + np.cumsum(sizes) - sizes, addresses, sizes, stream)


def runtime_copies() -> PieceCopies:
    """Those of the runtime that torch has loaded.

    Calls keep the interpreter's lock: they only queue, 64 pieces in 0.1 ms. Beside a scheduler that is at work, to get
    the lock back would take up to 0.5 ms.

    Raises:
        ConfigError: torch has it built in.
    """
    version = (torch.version.cuda or "").partition(".")[0]
    name = f"libcudart.so.{version}"
    try:
        runtime = ctypes.PyDLL(name)
    except OSError as error:
        raise ConfigError(
            f"--device cuda: {name}, which torch should have loaded, is not there: {error}"
        ) from None
    return copies_of(runtime, int(version))


def copies_of(runtime: Any, version: int) -> PieceCopies:
    """The fastest that a runtime has.

    Args:
        version: of CUDA, the first number.
    """
    address, size = ctypes.c_void_p, ctypes.c_size_t
    memcpy = runtime.cudaMemcpyAsync
    memcpy.argtypes, memcpy.restype = (address, address, size, ctypes.c_int, address), ctypes.c_int
    one_by_one = OneByOne(memcpy)
    if version < _BATCHES_SINCE or not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return one_by_one
    batch = runtime.cudaMemcpyBatchAsync
    batch.argtypes = (address, address, address, size, address, address, size, address)
    batch.restype = ctypes.c_int
    return Batches(batch, one_by_one, runtime.cudaGetLastError)
