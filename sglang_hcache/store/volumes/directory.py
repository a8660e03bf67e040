"""The store's directories: private, locked, and sure of their place (docs/store-format.md, "Directories")."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.paths import ranks_named_by
from sglang_hcache.store.format.names import (
    LOCK_NAME,
    OWN_NAMES,
    STATE_NAME,
    STATE_TMP_NAME,
    SUPERBLOCK_NAME,
    SUPERBLOCK_TMP_NAME,
)
from sglang_hcache.store.format.state import MAX_BYTES as MAX_STATE_BYTES
from sglang_hcache.store.format.superblock import MAX_BYTES, Superblock
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.io.probing import gives_direct_reads, takes_direct_writes
from sglang_hcache.store.volumes.files import SegmentFile, preallocate, zero
from sglang_hcache.store.volumes.health import GONE_ERRNOS, OWN_ERRNOS
from sglang_hcache.store.volumes.lock import DirectoryLock

_SEGMENT_NAME = re.compile(r"segment-(\d{8,15})\.seg")
_HARMLESS_NAMES = frozenset({"lost+found"})

logger = logging.getLogger(__name__)


class StoreDirectory:
    """One private directory of a store; plain file operations, which may fail and may hang.

    Holds the lock from :meth:`acquire` on; ``looking.SeenDirectory`` does without.

    Args:
        user_pid: the process that others are told to stop, if it is not this one.
    """

    def __init__(self, path: Path, user_pid: int | None = None, *, may_make: bool = True) -> None:
        self.path = path
        self._may_make = may_make
        self.direct = False
        """Whether segment files are opened with O_DIRECT; set by :meth:`probe`."""
        self._has_warned = False
        self.lock = DirectoryLock(path, user_pid)

    def acquire(self) -> None:
        """Create the directory if it is missing and may be made, check that it is ours, make it private, and lock it.

        Also after it was away: keeps the lock where it is still the same directory. What a crash left is deleted.

        Raises:
            StoreFormatError: not a directory of our own; nothing is changed.
            StoreLockedError: another process has it.
            OSError: the file system refuses.
        """
        _make(self.path, self._may_make)
        self.check_ours()
        # Only if need be: what is mounted read-only is served.
        if stat.S_IMODE(self.path.stat().st_mode) != 0o700:
            os.chmod(self.path, 0o700)
        self.lock.take()
        for name in (SUPERBLOCK_TMP_NAME, STATE_TMP_NAME):
            with contextlib.suppress(OSError):  # harmless, and not on a disk that takes no writes
                (self.path / name).unlink(missing_ok=True)

    def segment_path(self, segment: int) -> Path:
        """File of ``segment`` in this directory."""
        return self.path / f"segment-{segment:08d}.seg"

    def segment_numbers(self) -> list[int]:
        """Of every segment file here; asks none of them, which takes long where there are thousands. Raises OSError."""
        found = (_SEGMENT_NAME.fullmatch(entry.name) for entry in self._entries())
        return [int(match.group(1)) for match in found if match is not None]

    def segment_sizes(self) -> dict[int, int]:
        """Bytes of every segment file here, by segment number; otherwise as :meth:`segment_files`. Raises OSError."""
        return {number: file.size for number, file in self.segment_files().items()}

    def segment_files(self) -> dict[int, SegmentFile]:
        """Every segment file here, by segment number; one that cannot be asked, if others can, counts as empty.

        Raises:
            OSError: the directory is gone or sick.
        """
        files: dict[int, SegmentFile] = {}
        failures: list[OSError] = []
        for entry in self._entries():
            if (match := _SEGMENT_NAME.fullmatch(entry.name)) is None:
                continue
            try:
                if entry.is_file(follow_symlinks=False):
                    files[int(match.group(1))] = SegmentFile.of(entry.stat(follow_symlinks=False))
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                _raise_unless_of_one_file(error)
                logger.warning("hcache: %s cannot be used: %s", entry.path, error)
                failures.append(error)
                files[int(match.group(1))] = SegmentFile(0, 0, -math.inf)
        if len(failures) > 1 and len(failures) == len(files):
            raise failures[-1]
        return files

    def allocated_bytes(self) -> int:
        """Bytes of the directory and all in it, as ``du`` counts; slow with thousands of files. Raises OSError."""
        return 512 * (self.path.stat().st_blocks + sum(_blocks(entry) for entry in self._entries()))

    def free_bytes(self) -> int:
        """Bytes this user may still allocate on the file system. Raises OSError."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """Size of the file system. Raises OSError."""
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize

    def device(self) -> int:
        """Number of the file system while it is mounted; directories on one share its free space. Raises OSError."""
        return self.path.stat().st_dev

    def file_system(self) -> int:
        """Identity of the file system, which most keep when they are mounted again. Raises OSError."""
        return os.statvfs(self.path).f_fsid

    def is_present(self) -> bool:
        """Whether the directory is still the one that was locked. Raises OSError."""
        return self.lock.is_here() and has_superblock(self.path)

    def create_segment(self, segment: int, size: int) -> None:
        """Create and preallocate a file, durably; nothing is left behind if it fails.

        Raises:
            OSError: also when the file exists.
        """
        name = self.segment_path(segment).name
        with self._opened() as place:
            flags = _flags(os.O_RDWR | os.O_CREAT | os.O_EXCL, self.direct)
            fd = os.open(name, flags, 0o600, dir_fd=place)
            try:
                os.fchmod(fd, 0o600)
                preallocate(fd, size)
                os.fsync(place)
            except OSError:
                os.unlink(name, dir_fd=place)
                raise
            finally:
                os.close(fd)

    def open_to_write(self, segment: int) -> OpenFile:
        """A segment's file for reading and writing, O_DIRECT where the probe allowed it. Raises OSError."""
        return OpenFile(os.open(self.segment_path(segment), _flags(os.O_RDWR, self.direct)), self.direct)

    def open_to_read(self, segment: int, direct: bool) -> OpenFile:
        """A segment's file for reading only, with O_DIRECT or through the page cache. Raises OSError."""
        return OpenFile(os.open(self.segment_path(segment), _flags(os.O_RDONLY, direct)), direct)

    def trim_segment(self, segment: int, size: int) -> None:
        """Cut a file behind ``size`` bytes; one of which nothing is used may be gone. Raises OSError.

        Its time stays that of the last write: how old chunks are is told from it.
        """
        path = self.segment_path(segment)
        try:
            found = path.stat()
            if found.st_size > size:
                os.truncate(path, size)
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        except FileNotFoundError:
            if size:
                raise

    def segment_bytes(self, segment: int) -> int:
        """What a file takes: the larger of its length and its allocated blocks; 0 if it is gone. Raises OSError."""
        try:
            return SegmentFile.of(self.segment_path(segment).stat()).taken_bytes
        except FileNotFoundError:
            return 0

    def unlink_segment(self, segment: int) -> None:
        """Delete a file; no matter if it is gone. Raises OSError."""
        self.segment_path(segment).unlink(missing_ok=True)

    def sync(self) -> None:
        """Files that were deleted do not come back after a power cut. Raises OSError."""
        with self._opened() as place:
            os.fsync(place)

    def keep_of_segment(self, segment: int, kept: Sequence[tuple[int, int]]) -> None:
        """Durably zero a file but for bytes [begin, end) of each of ``kept``; its time stays. Raises OSError."""
        fd = os.open(self.segment_path(segment), _flags(os.O_RDWR, False))
        try:
            found, at = os.fstat(fd), 0
            for begin, end in [*sorted(kept), (found.st_size, found.st_size)]:
                zero(fd, at, begin)
                at = max(at, end)
            os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(fd)
        finally:
            os.close(fd)

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
                f"{path} is damaged ({error}); `hcache store fsck --rebuild` with all directories of the store makes a "
                f"new one; to start an empty store, stop its server and delete all that is in them"
            ) from None

    def write_superblock(self, superblock: Superblock) -> None:
        """Write it durably, in one step. Raises OSError."""
        self._write(SUPERBLOCK_NAME, SUPERBLOCK_TMP_NAME, superblock.to_json())

    def read_state(self) -> bytes | None:
        """What :meth:`write_state` wrote; None if there is nothing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), open(self.path / STATE_NAME, "rb") as file:
            return file.read(MAX_STATE_BYTES)
        return None

    def write_state(self, text: bytes) -> None:
        """Write it durably, in one step. Raises OSError."""
        self._write(STATE_NAME, STATE_TMP_NAME, text)

    def _write(self, name: str, temporary: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with self._opened() as place:
            try:
                with open(os.open(temporary, flags, 0o600, dir_fd=place), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file)
                os.rename(temporary, name, src_dir_fd=place, dst_dir_fd=place)
            except OSError:
                with contextlib.suppress(OSError):  # on a full disk it takes room
                    os.unlink(temporary, dir_fd=place)
                raise
            os.fsync(place)

    def place(self) -> Path:
        """The directory, or the one in which it would be made. Raises OSError."""
        place = self.path
        while not place.exists():
            place = place.parent
        return place

    def is_empty(self) -> bool:
        """Whether the directory holds nothing but what :meth:`acquire` makes. Raises OSError."""
        return all(entry.name in {LOCK_NAME, *_HARMLESS_NAMES} for entry in self._entries())

    def strangers(self) -> list[str]:
        """Names of what no store made. Raises OSError."""
        names = {entry.name for entry in self._entries()} - OWN_NAMES - _HARMLESS_NAMES
        return sorted(name for name in names if not _SEGMENT_NAME.fullmatch(name))

    def check_ours(self) -> None:
        """Whether a store may be here: changes nothing.

        Raises:
            StoreFormatError: not a directory, open to other users, or with files that no store made.
            OSError: it is missing, or cannot be asked.
        """
        path = self.path
        check_private(path, os.geteuid())
        strangers = self.strangers()
        if strangers and not has_superblock(path):
            raise StoreFormatError(
                f"{path} holds other files{_maker(strangers[0])}; give --hcache-dirs an empty or a new directory"
            )

    def probe(self) -> None:
        """Write a block durably and read it back, with O_DIRECT if the file system has it; warns once if not.

        Raises:
            OSError: not even an ordinary write works.
        """
        self.direct = takes_direct_writes(self.path)
        if not self.direct and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "hcache: %s does not support O_DIRECT; its reads and writes use the page cache", self.path
            )

    def probe_reading(self) -> None:
        """Read a block of the newest segment, if there is one: what can be tried on a full disk.

        Raises:
            OSError: it cannot be read.
        """
        numbers = self.segment_numbers()
        if numbers:
            self.direct = gives_direct_reads(self.segment_path(max(numbers)))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the directory itself: what is created relative to it cannot land where it was mounted.

        Raises:
            FileNotFoundError: another directory is at its path than the one that was locked, or none.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not self.lock.is_here(fd):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            yield fd
        finally:
            os.close(fd)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            yield from entries


def _make(path: Path, may_make: bool) -> None:
    """
    Raises:
        StoreFormatError: that of a rank would be in one that is not private.
        OSError: there is no store's directory, and it may not be made.
    """
    if not may_make and not has_superblock(path):
        raise FileNotFoundError(errno.ENOENT, "it has no superblock", str(path))
    if ranks_named_by(path.name) is not None:
        _make(path.parent, may_make=True)
        check_private(path.parent, os.geteuid())
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)


def _maker(name: str) -> str:
    """``name`` in brackets, behind who made it where that is known."""
    num_ranks = ranks_named_by(name)
    return f" ({name!r})" if num_ranks is None else f" of a server with --tp-size {num_ranks} ({name!r})"


def check_private(path: Path, user: int) -> None:
    """
    Raises:
        StoreFormatError: it is not a directory of ``user`` that nobody else may write to, or of a rank and in another.
        OSError: it is missing, or cannot be asked.
    """
    if ranks_named_by(path.name) is not None:
        check_private(path.parent, user)
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StoreFormatError(f"{path} is not a directory; change --hcache-dirs")
    if found.st_uid != user:
        raise StoreFormatError(
            f"{path} belongs to user {found.st_uid}, not to {user}; give --hcache-dirs a directory "
            "of your own: cached prompts are private"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreFormatError(
            f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}); "
            f"run `chmod 700 {path}` if you trust what is in it, or change --hcache-dirs. If Kubernetes did that "
            "(fsGroup), use a volume without fsGroup, or fsGroupChangePolicy: OnRootMismatch"
        )


def has_superblock(path: Path) -> bool:
    """Whether a directory has one, good or damaged. Raises OSError."""
    return (path / SUPERBLOCK_NAME).exists()


def _raise_unless_of_one_file(error: OSError) -> None:
    """``error`` came of asking for a file: is the device gone, or this process short of something?"""
    if error.errno in GONE_ERRNOS | OWN_ERRNOS:
        raise error


def _blocks(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks
    except OSError as error:  # evicted meanwhile, or damaged
        _raise_unless_of_one_file(error)
        return 0


def _flags(flags: int, direct: bool) -> int:
    return flags | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
