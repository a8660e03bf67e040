"""The lock of a store's directory: who has it may write there (docs/store-format.md, "Directories")."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import StoreLockedError
from sglang_hcache.store.format.names import LOCK_NAME
from sglang_hcache.store.volumes.health import FULL_ERRNOS

_ATTEMPTS = 3
_PAUSE_S = 0.05
_LINE_BYTES = 256


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who has a lock, as its file says."""

    pid: str
    """In decimal; ``unknown`` where the file does not say."""
    host: str = ""
    """A container has a name, and process ids, of its own. Empty where the file does not say."""

    def __str__(self) -> str:
        is_here = self.host in ("", socket.gethostname())
        return f"process {self.pid}" if is_here else f"process {self.pid} on {self.host}"


class DirectoryLock:
    """``flock`` on a file in a directory. Ends with the process, however that ends.

    Args:
        user_pid: the process that others are told to stop, if it is not this one.
    """

    def __init__(self, directory: Path, user_pid: int | None = None) -> None:
        self._directory = directory
        self._user_pid = user_pid
        self._fd = self._directory_fd = -1
        self._releases_in_child = False

    def take(self) -> None:
        """Take the lock, unless it is held where the directory is now.

        Raises:
            StoreLockedError: another process has it.
            OSError: the file system refuses.
        """
        if not self.is_here():
            fd = self._try_to_take()
            self.release()
            self._fd = fd
            self._directory_fd = _shared(self._directory)
            self._release_in_child()

    def release(self) -> None:
        """Give it up; further calls do nothing."""
        for fd in (self._directory_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory_fd = -1

    def is_here(self, directory_fd: int | None = None) -> bool:
        """Whether it is taken, and its file is in the directory still, or in the open one. Raises OSError."""
        path = self._directory / LOCK_NAME if directory_fd is None else LOCK_NAME
        if self._fd < 0:
            return False
        try:
            found = os.stat(path, dir_fd=directory_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def holder(self) -> LockHolder | None:
        """Whoever has it, to be stopped; None if it is free. Raises OSError."""
        try:
            fd = os.open(self._directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _written_in(fd)
        finally:
            os.close(fd)
        return None

    def _release_in_child(self) -> None:
        """A forked child would hold the lock for as long as it lives, also when this process was killed.

        Not before it is taken: what is registered stays, and a server whose disk is away makes lock after lock.
        """
        if not self._releases_in_child:
            os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))
            self._releases_in_child = True

    def _try_to_take(self) -> int:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(StoreLockedError):  # perhaps by `hcache store`, asking who holds it
                return self._try_once()
            time.sleep(_PAUSE_S)
        return self._try_once()

    def _try_once(self) -> int:
        fd, is_writable = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_writable:
                os.fchmod(fd, 0o600)
                _write_down(fd, self._user_pid or os.getpid())
        except BlockingIOError:
            holder = _written_in(fd)
            os.close(fd)
            raise StoreLockedError(
                f"{self._directory} is in use by {holder}; stop it or use other directories (--hcache-dirs)"
            ) from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def _open(self) -> tuple[int, bool]:
        """The file, made if need be, and whether it can be written: not where its file system is mounted read-only."""
        path, flags = self._directory / LOCK_NAME, os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | os.O_RDWR, 0o600), True
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(path, flags | os.O_RDONLY, 0o600), False


def _shared(directory: Path) -> int:
    """A shared lock on the directory itself, or -1: systemd-tmpfiles deletes no old files where somebody has one."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        except OSError:
            os.close(fd)
    return -1


def _write_down(fd: int, pid: int) -> None:
    """Say who has the lock; a full disk may not take that, and the lock is good without."""
    text = f"{pid} {socket.gethostname()}\n".encode()
    try:
        os.pwrite(
            fd, text, 0
        )  # before it is cut: the block that an earlier one has is written to without room
        os.ftruncate(fd, len(text))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)  # not somebody else's


def _written_in(fd: int) -> LockHolder:
    line, _, _ = os.pread(fd, _LINE_BYTES, 0).decode(errors="replace").partition("\n")
    return LockHolder(*line.split()[:2] or ["unknown"])


def _release(reference: weakref.ref[DirectoryLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()
