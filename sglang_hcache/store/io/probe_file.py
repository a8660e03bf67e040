"""The file that a directory is tried with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_hcache.store.format.names import PROBE_NAME
from sglang_hcache.store.io.engine import OpenFile


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
