"""The lock of a store's directory: who has it may write there (docs/store-format.md, "Directories")."""

from __future__ import annotations

import contextlib
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
_LOOKS = 20
_LINE_BYTES = 256


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who has a lock, as its file says; as text, with what a user has to know to find that process."""

    pid: str
    """In decimal; ``unknown`` where the file does not say."""
    host: str = ""
    namespace: str = ""
    """Where ``pid`` counts, as ``/proc/PID/ns/pid`` has it. Host and namespace are empty where nothing is known."""

    def __str__(self) -> str:
        if self._is_seen():
            return f"process {self.pid}"
        place = f" on {self.host}" if self.host else ""
        return (
            f"process {self.pid}{place} (not to be seen from here: it is on another host or in another container, or "
            "has ended and left a child)"
        )

    def _is_seen(self) -> bool:
        """Whether the process is there for this one, as far as can be told."""
        here = (socket.gethostname(), _pid_namespace())
        if self.namespace and (self.host, self.namespace) != here:
            return False
        try:
            os.kill(int(self.pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except (OSError, ValueError):  # somebody else's; or nothing is known
            return True
        return True


class DirectoryLock:
    """``flock`` on a file in a directory. Ends with the process, however that ends.

    Args:
        user_pid: the process that others are told to stop, if it is not this one.
    """

    def __init__(self, directory: Path, user_pid: int | None = None) -> None:
        self._directory = directory
        self._user_pid = user_pid
        self._fd = -1
        # A forked child would hold the lock for as long as it lives, also when this process was killed.
        os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))

    @property
    def is_taken(self) -> bool:
        """Whether this process took it, wherever the file is now."""
        return self._fd >= 0

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

    def release(self) -> None:
        """Give it up; further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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

    def _try_to_take(self) -> int:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(StoreLockedError):  # perhaps by `hcache store`, asking who holds it
                return self._try_once()
            time.sleep(_PAUSE_S)
        return self._try_once()

    def _try_once(self) -> int:
        fd = os.open(
            self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _write_down(fd: int, pid: int) -> None:
    """Say who has the lock; a full disk may not take that, and the lock is good without."""
    text = f"{pid} {socket.gethostname() or '-'} {_pid_namespace()}\n".encode()
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
    for _ in range(_LOOKS):
        line, end, _ = os.pread(fd, _LINE_BYTES, 0).decode(errors="replace").partition("\n")
        if end and (words := line.split()):
            return LockHolder(*words[:3])
        time.sleep(_PAUSE_S)  # who has just taken it is about to write
    return LockHolder("unknown")


def _pid_namespace() -> str:
    """Which process ids mean the same as this process's; empty where that is not known."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _release(reference: weakref.ref[DirectoryLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()
