from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sglang_hcache.store.volumes import files
from sglang_hcache.store.volumes.files import preallocate


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


@pytest.mark.parametrize("makes_holes", [True, False])
def test_a_part_of_a_file_becomes_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_holes: bool
) -> None:
    if not makes_holes:
        monkeypatch.setattr(files, "_fallocate", lambda *_: False)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3 * 2**20)
    fd = os.open(path, os.O_RDWR)
    try:
        files.zero(fd, 4096, 2**21 + 4096)
        files.zero(fd, 0, 0)
    finally:
        os.close(fd)
    assert path.read_bytes() == b"x" * 4096 + bytes(2**21) + b"x" * (2**20 - 4096)
