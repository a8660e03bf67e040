from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sglang_hcache.store.volumes.preallocation import preallocate


def test_what_the_system_refuses_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            preallocate(fd, 4096)
    finally:
        os.close(fd)
    assert path.stat().st_size == 0


def test_a_file_has_its_length(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        preallocate(file.fileno(), 2**20)
        assert os.fstat(file.fileno()).st_size == 2**20
