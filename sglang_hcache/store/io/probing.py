"""Whether blocks can be written and read in a directory, and the file that it is tried with."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.names import PROBE_NAME
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.memory import aligned_empty

_NO_DIRECT_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without O_DIRECT."""


@contextlib.contextmanager
def probe_file(folder: Path, direct: bool) -> Iterator[OpenFile]:
    """A new empty file for reading and writing, removed in the end. Raises OSError.

    Args:
        direct: with O_DIRECT.
    """
    path = folder / PROBE_NAME
    path.unlink(missing_ok=True)  # of a process that was killed
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = OpenFile(os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600), direct)
    try:
        yield file
    finally:
        path.unlink(missing_ok=True)


def takes_direct_writes(folder: Path) -> bool:
    """Whether a block can be written durably and read back with O_DIRECT; if not, it can through the page cache.

    Raises:
        OSError: neither works.
    """
    try:
        is_well, is_direct = _comes_back(folder, True), True
    except OSError as error:
        if error.errno not in _NO_DIRECT_ERRNOS:
            raise
        is_well, is_direct = _comes_back(folder, False), False
    if not is_well:
        raise OSError(errno.EIO, "what was written did not come back")
    return is_direct


def gives_direct_reads(path: Path) -> bool:
    """Whether a block of a file can be read with O_DIRECT; if not, it can through the page cache.

    Raises:
        OSError: neither works.
    """
    try:
        _read_block(path, os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT_ERRNOS:
            raise
        _read_block(path, 0)
        return False
    return True


def _comes_back(folder: Path, direct: bool) -> bool:
    """Whether a block comes back that is written durably to a new file. Raises OSError."""
    block = aligned_empty(BLOCK)
    block[:] = 0xA5
    with probe_file(folder, direct) as file:
        written = os.pwritev(file.fd, [block.data], 0)
        os.fsync(file.fd)
        block[:] = 0
        read = os.preadv(file.fd, [block.data], 0)
    return written == BLOCK and read == BLOCK and bool((block == 0xA5).all())


def _read_block(path: Path, flags: int) -> None:
    """Read the first block of a file, opened with ``flags``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags)
    try:
        os.preadv(fd, [aligned_empty(BLOCK).data], 0)
    finally:
        os.close(fd)
