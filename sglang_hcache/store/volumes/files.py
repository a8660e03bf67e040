"""Files of segments: what is known of one without opening it, and reserving its blocks and giving them back."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass

from sglang_hcache.store.io.engine import OpenFile

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ZEROS = bytes(2**20)


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """What a listing says of a segment's file."""

    size: int
    taken_bytes: int
    """The larger of its length and its allocated blocks."""
    written_s: float
    """When it was last written to, seconds since 1970; -inf: unknown."""

    @classmethod
    def of(cls, found: os.stat_result) -> SegmentFile:
        return cls(found.st_size, max(found.st_size, found.st_blocks * 512), found.st_mtime)


def preallocate(fd: int, size: int) -> None:
    """Give a new file its length, and its blocks where the file system can do that without writing them.

    Not by ``os.posix_fallocate``: where the file system cannot (ext3, NFS before 4.2), glibc writes a byte to every
    block, one call after the other. For a segment of 4 GiB that takes long enough to count as a disk that hangs.

    Raises:
        OSError: no room, or the device fails.
    """
    if not _fallocate(fd, 0, 0, size):
        os.ftruncate(fd, size)


def zero(fd: int, begin: int, end: int) -> None:
    """Make bytes [begin, end) of a file zeros: a hole where the file system can do that, else they are overwritten.

    Raises:
        OSError: the device fails.
    """
    if begin < end and not _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin):
        while begin < end:
            begin += os.pwrite(fd, memoryview(_ZEROS)[: end - begin], begin)


def drop_cached(file: OpenFile) -> None:
    """Take a file out of the page cache. Raises OSError."""
    os.fdatasync(file.fd)  # what is not durable yet would stay
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _fallocate(fd: int, mode: int, begin: int, size: int) -> bool:
    """False if the file system cannot do that. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_longlong(begin), ctypes.c_longlong(size))
    while libc.fallocate(*arguments):
        number = ctypes.get_errno()
        if number in _CANNOT:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True
