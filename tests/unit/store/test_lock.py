"""Whoever finds a directory locked is told by whom, in words that help there."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreLockedError
from sglang_hcache.store.volumes.lock import DirectoryLock, LockHolder

HOST, NAMESPACE = socket.gethostname(), str(os.stat("/proc/self/ns/pid").st_ino)
NOT_SEEN = (
    "(not to be seen from here: it is on another host or in another container, or has ended and left a child)"
)


def ended() -> str:
    process = subprocess.Popen(["true"])
    process.wait()
    return str(process.pid)


def test_a_process_that_is_there() -> None:
    pid = str(os.getpid())
    for holder in (LockHolder(pid, HOST, NAMESPACE), LockHolder("1", HOST, NAMESPACE), LockHolder(pid)):
        assert str(holder) == f"process {holder.pid}"
    assert str(LockHolder("unknown")) == "process unknown"


def test_a_process_that_is_not_to_be_seen() -> None:
    pid = str(os.getpid())  # there is one with this number here, which has nothing to do with it
    assert str(LockHolder(pid, "pod-a", NAMESPACE)) == f"process {pid} on pod-a {NOT_SEEN}"
    assert str(LockHolder(pid, HOST, "17")) == f"process {pid} on {HOST} {NOT_SEEN}"
    assert str(LockHolder(gone := ended(), HOST, NAMESPACE)) == f"process {gone} on {HOST} {NOT_SEEN}"
    assert str(LockHolder(gone)) == f"process {gone} {NOT_SEEN}"
    assert NOT_SEEN in str(LockHolder("9" * 30))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("77 pod-a 4026532201\n", LockHolder("77", "pod-a", "4026532201")),
        ("77 pod-a 4026532201 and more\nand more", LockHolder("77", "pod-a", "4026532201")),
        ("77\n", LockHolder("77")),
    ],
)
def test_what_the_file_says(tmp_path: Path, written: str, expected: LockHolder) -> None:
    lock, other = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    lock.take()
    assert other.holder() == LockHolder(str(os.getpid()), HOST, NAMESPACE)
    (tmp_path / "lock").write_text(written)
    assert other.holder() == expected
    with pytest.raises(StoreLockedError) as error:
        other.take()
    assert f"{tmp_path} is in use by {expected}; stop it or use other directories" in str(error.value)
    lock.release()
    assert other.holder() is None
