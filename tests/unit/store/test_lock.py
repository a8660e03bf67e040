"""Whoever finds a directory locked is told by whom, in words that help there."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreLockedError
from sglang_hcache.store.volumes.lock import DirectoryLock, LockHolder

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("77 pod-a\n", "process 77 on pod-a"),
        ("77 pod-a and more\nand more", "process 77 on pod-a"),
        ("77\n", "process 77"),
        ("", "process unknown"),
    ],
)
def test_what_the_file_says(tmp_path: Path, written: str, expected: str) -> None:
    lock, other = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    lock.take()
    assert other.holder() == LockHolder(str(os.getpid()), HOST)
    (tmp_path / "lock").write_text(written)
    assert str(other.holder()) == expected
    with pytest.raises(StoreLockedError) as error:
        other.take()
    assert f"{tmp_path} is in use by {expected}; stop it or use other directories" in str(error.value)
    lock.release()
    assert other.holder() is None


def test_whoever_deletes_old_files_sees_that_the_directory_is_used(tmp_path: Path) -> None:
    """systemd-tmpfiles deletes what nobody touched for weeks, but nothing below a directory that is locked."""

    def is_skipped() -> bool:
        fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    lock = DirectoryLock(tmp_path)
    assert not is_skipped()
    lock.take()
    assert is_skipped()
    lock.release()
    assert not is_skipped()


def test_a_lock_that_was_not_taken_registers_nothing_for_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is registered stays for good, and a server whose disk is away makes lock after lock."""
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    absent = DirectoryLock(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        absent.take()
    assert not registered
    lock = DirectoryLock(tmp_path)
    for _ in range(3):
        lock.take()
        lock.release()
    assert len(registered) == 1
