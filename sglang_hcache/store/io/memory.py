"""Aligned memory: O_DIRECT wants buffers at multiples of 4096."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.store.format.geometry import BLOCK, round_up

ByteArray = npt.NDArray[np.uint8]
"""A C-contiguous one-dimensional array of bytes."""


def aligned_empty(size: int) -> ByteArray:
    """A new byte array of ``size`` bytes whose memory begins at a multiple of 4096. Pages are zero.

    Core dumps leave it out: chunks are as private as prompts.
    """
    if size < 0:
        raise ValueError(f"negative size {size}")
    pages = mmap.mmap(-1, max(round_up(size), BLOCK))
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(pages, dtype=np.uint8)[:size]


def is_aligned(array: ByteArray) -> bool:
    """Whether the memory of ``array`` begins at a multiple of 4096."""
    return bool(array.ctypes.data % BLOCK == 0)


def check_bytes(array: npt.NDArray[Any], size: int, name: str) -> None:
    """
    Raises:
        ValueError: ``array`` is not a C-contiguous one-dimensional uint8 array of ``size`` bytes.
    """
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous or array.size != size:
        raise ValueError(
            f"{name} must be a contiguous 1-D uint8 array of {size} bytes, "
            f"got {array.dtype} of shape {array.shape}"
        )


class ScratchPool(threading.local):
    """One growing aligned buffer a thread, for headers and for payloads that cannot go straight.

    What :meth:`take` returns is valid until the same thread takes again.
    """

    KEEP_BYTES = 64 * 2**20
    """A larger buffer is not kept."""

    def __init__(self) -> None:
        self._buffer: ByteArray = np.empty(0, np.uint8)

    def take(self, size: int) -> ByteArray:
        """``size`` bytes of aligned memory with arbitrary contents.

        Raises:
            StoreIOError: there is not so much.
        """
        if size <= self._buffer.size:
            return self._buffer[:size]
        try:
            buffer = aligned_empty(size)
        except OSError as error:
            raise StoreIOError(f"no memory for {size} bytes: {error}") from error
        if size <= self.KEEP_BYTES:
            self._buffer = buffer
        return buffer

    def discard(self) -> None:
        """Leave the thread's buffer to an operation that was given up but may still touch it."""
        self._buffer = np.empty(0, np.uint8)
