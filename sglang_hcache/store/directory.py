"""The store's directories: private, locked, and sure of their place (docs/store-format.md, "Directories")."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_hcache.core.errors import StoreFormatError, StoreIOError, StoreLockedError
from sglang_hcache.store.geometry import BLOCK
from sglang_hcache.store.memory import aligned_empty
from sglang_hcache.store.record import FORMAT_VERSION

LOCK_NAME = "lock"
SUPERBLOCK_NAME = "superblock.json"
INDEX_NAME = "index.sqlite"
_PROBE_NAME = "probe.tmp"
_SUPERBLOCK_TMP_NAME = "superblock.tmp"
_SEGMENT_NAME = re.compile(r"segment-(\d{8,})\.seg")
_OWN_NAMES = frozenset(
    {LOCK_NAME, SUPERBLOCK_NAME, _SUPERBLOCK_TMP_NAME, _PROBE_NAME}
    | {INDEX_NAME + suffix for suffix in ("", "-wal", "-shm", "-journal")}
)
_HARMLESS_NAMES = frozenset({"lost+found"})

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Superblock:
    """Which store a directory belongs to, and where in it."""

    store_id: str
    """32 hexadecimal digits."""
    stripe: int
    num_stripes: int
    format_version: int = FORMAT_VERSION


class StoreDirectory:
    """One private, locked directory of a store. Made by :meth:`acquire`; ``release`` gives the lock back."""

    def __init__(self, path: Path, stripe: int, lock_fd: int) -> None:
        self.path = path
        self.stripe = stripe
        self.direct = False
        """Whether segment files are opened with O_DIRECT; set by :meth:`probe_direct`."""
        self._lock_fd = lock_fd

    @classmethod
    def acquire(cls, path: Path, stripe: int) -> StoreDirectory:
        """Create ``path`` if it is missing, check that it is private, and lock it.

        Raises:
            StoreFormatError: not a directory of our own, or it holds files of something else.
            StoreLockedError: another process has it.
            StoreIOError: the file system refuses.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(path)
            lock_fd = _lock(path)
        except FileExistsError:
            raise StoreFormatError(f"{path} is not a directory; change --hcache-dirs") from None
        except OSError as error:
            raise StoreIOError(f"cannot use {path} (--hcache-dirs): {error}") from error
        return cls(path, stripe, lock_fd)

    def release(self) -> None:
        """Give up the lock; further calls do nothing."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

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
        """Number of the file system; directories that share one share its free space."""
        return self.path.stat().st_dev

    def open_segment(self, segment: int, create: bool = False) -> int:
        """A file descriptor for reading and writing, O_DIRECT where the probe allowed it.

        Raises:
            OSError: also when ``create`` finds the file present.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if self.direct:
            flags |= os.O_DIRECT
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return os.open(self.segment_path(segment), flags, 0o600)

    def sync(self) -> None:
        """Make created and renamed names durable."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_superblock(self) -> Superblock | None:
        """The superblock; None in a directory that has none yet.

        Raises:
            StoreFormatError: it cannot be understood, or there is none among files of something else.
        """
        path = self.path / SUPERBLOCK_NAME
        try:
            fields = json.loads(path.read_bytes())
            return Superblock(
                store_id=_typed(fields, "store_id", str),
                stripe=_typed(fields, "stripe", int),
                num_stripes=_typed(fields, "num_stripes", int),
                format_version=_typed(fields, "format_version", int),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreFormatError(
                f"{path} is damaged ({error}); delete all files in {self.path} to start an empty store there"
            ) from None

    def write_superblock(self, superblock: Superblock) -> None:
        """Write it durably, in one step. Raises OSError."""
        text = json.dumps(
            {
                "format_version": superblock.format_version,
                "store_id": superblock.store_id,
                "stripe": superblock.stripe,
                "num_stripes": superblock.num_stripes,
            }
        )
        temporary = self.path / _SUPERBLOCK_TMP_NAME
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, text.encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(self.path / SUPERBLOCK_NAME)
        self.sync()

    def check_no_strangers(self) -> None:
        """
        Raises:
            StoreFormatError: the directory holds files that no store made.
        """
        for entry in self._entries():
            ours = entry.name in _OWN_NAMES or _SEGMENT_NAME.fullmatch(entry.name)
            if not ours and entry.name not in _HARMLESS_NAMES:
                raise StoreFormatError(
                    f"{self.path} holds other files ({entry.name!r}); "
                    "give --hcache-dirs an empty or a new directory"
                )

    def probe_direct(self) -> None:
        """Try O_DIRECT with a real write and read, and warn once if the file system refuses."""
        path = self.path / _PROBE_NAME
        path.unlink(missing_ok=True)
        try:
            self.direct = _direct_works(path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise StoreIOError(f"cannot write to {self.path} (--hcache-dirs): {error}") from error
            self.direct = False
        finally:
            path.unlink(missing_ok=True)
        if not self.direct:
            _log.warning("%s does not support O_DIRECT; its reads and writes use the page cache", self.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            yield from entries


def _typed(fields: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = fields[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}")
    return value


def _check_private(path: Path) -> None:
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
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreLockedError(
            f"{path} is in use by process {holder}; stop it or give this server other --hcache-dirs"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _direct_works(path: Path) -> bool:
    block = aligned_empty(BLOCK)
    block[:] = 0xA5
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        written = os.pwritev(fd, [block.data], 0)
        block[:] = 0
        return written == BLOCK and os.preadv(fd, [block.data], 0) == BLOCK and bool((block == 0xA5).all())
    finally:
        os.close(fd)
