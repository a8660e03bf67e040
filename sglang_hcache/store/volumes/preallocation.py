"""Reserving the blocks of a file before they are written."""

from __future__ import annotations

import ctypes
import errno
import os


def preallocate(fd: int, size: int) -> None:
    """Give a new file its length, and its blocks where the file system can do that without writing them.

    Not by ``os.posix_fallocate``: where the file system cannot (ext3, NFS before 4.2), glibc writes a byte to every
    block, one call after the other. For a segment of 4 GiB that takes long enough to count as a disk that hangs.

    Raises:
        OSError: no room, or the device fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_longlong(0), ctypes.c_longlong(size))
    while libc.fallocate(*arguments):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(fd, size)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
