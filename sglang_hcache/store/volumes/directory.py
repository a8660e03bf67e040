"""The store's directories: private, locked, and sure of their place (docs/store-format.md, "Directories")."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError, StoreLockedError
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.superblock import MAX_BYTES, Superblock
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.memory import aligned_empty
from sglang_hcache.store.io.rate import PROBE_NAME

LOCK_NAME = "lock"
SUPERBLOCK_NAME = "superblock.json"
INDEX_NAME = "index.sqlite"
SUPERBLOCK_TMP_NAME = "superblock.tmp"
_SEGMENT_NAME = re.compile(r"segment-(\d{8,15})\.seg")
_OWN_NAMES = frozenset(
    {LOCK_NAME, SUPERBLOCK_NAME, SUPERBLOCK_TMP_NAME, PROBE_NAME}
    | {INDEX_NAME + suffix for suffix in ("", "-wal", "-shm", "-journal")}
)
_HARMLESS_NAMES = frozenset({"lost+found"})
_LOCK_ATTEMPTS = 3
_LOCK_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class StoreDirectory:
    """One private directory of a store; plain file operations, which may fail and may hang.

    Made by :meth:`acquire`, which takes the lock; ``looking.SeenDirectory`` does without.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.direct = False
        """Whether segment files are opened with O_DIRECT; set by :meth:`probe_direct`."""
        self._lock_fd = lock_fd
        # A forked child would hold the lock for as long as it lives, also when this process was killed.
        os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))

    @classmethod
    def acquire(cls, path: Path) -> StoreDirectory:
        """Create ``path`` if it is missing, check that it is private, and lock it.

        Raises:
            StoreFormatError: not a directory of our own.
            StoreLockedError: another process has it.
            OSError: the file system refuses.
        """
        _make_private(path)
        return cls(path, _lock(path))

    def reacquire(self) -> None:
        """Take the directory again after it was away; keeps the lock where it is still the same directory.

        Raises:
            StoreFormatError, StoreLockedError, OSError: as :meth:`acquire`.
        """
        _make_private(self.path)
        if not self._holds_lock():
            fd = _lock(self.path)
            self.release()
            self._lock_fd = fd

    def release(self) -> None:
        """Give up the lock; further calls do nothing."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def lock_holder(self) -> str | None:
        """Process id of whoever holds the lock; None if it is free. Raises OSError."""
        try:
            fd = os.open(self.path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(fd)
        finally:
            os.close(fd)
        return None

    def segment_path(self, segment: int) -> Path:
        """File of ``segment`` in this directory."""
        return self.path / f"segment-{segment:08d}.seg"

    def segment_sizes(self) -> dict[int, int]:
        """Bytes of every segment file here, by segment number."""
        sizes = {}
        for entry in self._entries():
            match = _SEGMENT_NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                sizes[int(match.group(1))] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def physical_bytes(self) -> int:
        """Allocated bytes of the directory and everything in it."""
        total = self.path.stat().st_blocks
        for entry in self._entries():
            try:
                total += entry.stat(follow_symlinks=False).st_blocks
            except FileNotFoundError:  # evicted meanwhile
                continue
        return 512 * total

    def free_bytes(self) -> int:
        """Bytes this user may still allocate on the file system.

        Raises:
            OSError: the directory is gone or sick.
        """
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def device(self) -> int:
        """Number of the file system while it is mounted; directories on one share its free space. Raises OSError."""
        return self.path.stat().st_dev

    def file_system(self) -> int:
        """Identity of the file system, which most keep when they are mounted again. Raises OSError."""
        return os.statvfs(self.path).f_fsid

    def is_present(self) -> bool:
        """Whether the directory is still the one that was locked. Raises OSError."""
        return self._holds_lock() and (self.path / SUPERBLOCK_NAME).exists()

    def create_segment(self, segment: int, size: int) -> None:
        """Create and preallocate a file, durably; nothing is left behind if it fails.

        Raises:
            OSError: also when the file exists.
        """
        name = self.segment_path(segment).name
        with self._opened() as place:
            fd = os.open(name, self._flags(os.O_RDWR | os.O_CREAT | os.O_EXCL), 0o600, dir_fd=place)
            try:
                os.fchmod(fd, 0o600)
                _preallocate(fd, size)
                os.fsync(place)
            except OSError:
                os.unlink(name, dir_fd=place)
                raise
            finally:
                os.close(fd)

    def open_segment(self, segment: int) -> OpenFile:
        """A segment's file for reading and writing, O_DIRECT where the probe allowed it. Raises OSError.

        For reading only where the file system takes no writes.
        """
        try:
            return OpenFile(self._open(segment, os.O_RDWR), self.direct)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return OpenFile(self._open(segment, os.O_RDONLY), self.direct)

    def trim_segment(self, segment: int, size: int) -> None:
        """Cut a file behind ``size`` bytes; one of which nothing is used may be gone. Raises OSError."""
        path = self.segment_path(segment)
        try:
            if path.stat().st_size > size:
                os.truncate(path, size)
        except FileNotFoundError:
            if size:
                raise

    def segment_bytes(self, segment: int) -> int:
        """What a file takes: the larger of its length and its allocated blocks; 0 if it is gone. Raises OSError."""
        try:
            found = self.segment_path(segment).stat()
        except FileNotFoundError:
            return 0
        return max(found.st_size, found.st_blocks * 512)

    def unlink_segment(self, segment: int) -> None:
        """Delete a file; no matter if it is gone. Raises OSError."""
        self.segment_path(segment).unlink(missing_ok=True)

    def read_superblock(self) -> Superblock | None:
        """The superblock; None in a directory that has none yet.

        Raises:
            StoreFormatError: it cannot be understood.
            OSError: it cannot be read.
        """
        path = self.path / SUPERBLOCK_NAME
        try:
            with open(path, "rb") as file:
                return Superblock.from_json(file.read(MAX_BYTES + 1))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreFormatError(
                f"{path} is damaged ({error}); delete all files in {self.path} to start an empty store there"
            ) from None

    def write_superblock(self, superblock: Superblock) -> None:
        """Write it durably, in one step. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with self._opened() as place:
            fd = os.open(SUPERBLOCK_TMP_NAME, flags, 0o600, dir_fd=place)
            try:
                os.write(fd, superblock.to_json())
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(SUPERBLOCK_TMP_NAME, SUPERBLOCK_NAME, src_dir_fd=place, dst_dir_fd=place)
            os.fsync(place)

    def is_empty(self) -> bool:
        """Whether the directory holds nothing but what :meth:`acquire` makes. Raises OSError."""
        return all(entry.name in {LOCK_NAME, *_HARMLESS_NAMES} for entry in self._entries())

    def strangers(self) -> list[str]:
        """Names of what no store made. Raises OSError."""
        known = _OWN_NAMES | _HARMLESS_NAMES
        names = (entry.name for entry in self._entries())
        return sorted(name for name in names if name not in known and not _SEGMENT_NAME.fullmatch(name))

    def check_no_strangers(self) -> None:
        """
        Raises:
            StoreFormatError: the directory holds files that no store made.
        """
        strangers = self.strangers()
        if strangers:
            raise StoreFormatError(
                f"{self.path} holds other files ({strangers[0]!r}); give --hcache-dirs an empty or a new directory"
            )

    def probe_direct(self) -> None:
        """Try O_DIRECT with a real write and read, and warn once if the file system refuses.

        Raises:
            OSError: not even an ordinary write works.
        """
        try:
            self.direct = self._write_probe(os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self.direct = False
            self._write_probe(0)
        if not self.direct:
            _log.warning(
                "hcache: %s does not support O_DIRECT; its reads and writes use the page cache", self.path
            )

    def probe(self) -> None:
        """Write a block durably and read it back.

        Raises:
            OSError: the device is still not well.
        """
        if not self._write_probe(os.O_DIRECT if self.direct else 0):
            raise OSError(errno.EIO, "what was written did not come back")

    def _write_probe(self, flags: int) -> bool:
        """Whether a block written to a temporary file comes back."""
        path = self.path / PROBE_NAME
        path.unlink(missing_ok=True)
        block = aligned_empty(BLOCK)
        block[:] = 0xA5
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        try:
            written = os.pwritev(fd, [block.data], 0)
            os.fsync(fd)
            block[:] = 0
            read = os.preadv(fd, [block.data], 0)
            return written == BLOCK and read == BLOCK and bool((block == 0xA5).all())
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the directory itself: what is created relative to it cannot land where it was mounted.

        Raises:
            FileNotFoundError: another directory is at its path, or none.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            has_lock = self._lock_fd >= 0  # `hcache store` does some things without
            if has_lock and not os.path.samestat(os.stat(LOCK_NAME, dir_fd=fd), os.fstat(self._lock_fd)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            yield fd
        finally:
            os.close(fd)

    def _open(self, segment: int, flags: int) -> int:
        return os.open(self.segment_path(segment), self._flags(flags), 0o600)

    def _flags(self, flags: int) -> int:
        return flags | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self.direct else 0)

    def _holds_lock(self) -> bool:
        if self._lock_fd < 0:
            return False
        try:
            found = (self.path / LOCK_NAME).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._lock_fd))

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            yield from entries


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise StoreFormatError(f"{path} is not a directory; change --hcache-dirs") from None
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise StoreFormatError(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}; give --hcache-dirs a directory "
            "of your own: cached prompts are private"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreFormatError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}); "
            f"run `chmod 700 {path}` if you trust what is in it, or change --hcache-dirs"
        )
    os.chmod(path, 0o700)


def _lock(path: Path) -> int:
    for _ in range(_LOCK_ATTEMPTS - 1):
        with contextlib.suppress(StoreLockedError):  # perhaps by `hcache store`, asking who holds it
            return _lock_once(path)
        time.sleep(_LOCK_PAUSE_S)
    return _lock_once(path)


def _lock_once(path: Path) -> int:
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = _holder(fd)
        os.close(fd)
        raise StoreLockedError(
            f"{path} is in use by process {holder}; stop it or use other directories (--hcache-dirs)"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _release(reference: weakref.ref[StoreDirectory]) -> None:
    directory = reference()
    if directory is not None:
        directory.release()


def _holder(lock_fd: int) -> str:
    return os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _preallocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)
