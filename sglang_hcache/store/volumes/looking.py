"""Looking at a store's directories without their locks: nothing is written, and one that is sick is only reported."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import ConfigError, StoreFormatError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import check_distinct, rank_dir, real_place
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.io.engine import OpenFile
from sglang_hcache.store.volumes.agreement import Found, agreed, check_format, in_place
from sglang_hcache.store.volumes.directory import StoreDirectory, has_superblock
from sglang_hcache.store.volumes.health import GONE_ERRNOS, Condition, Health
from sglang_hcache.store.volumes.lock import LockHolder
from sglang_hcache.store.volumes.opening import agreed_at_start, check_may_begin
from sglang_hcache.store.volumes.ranks import check_shared, ranks_in
from sglang_hcache.store.volumes.volume import Volume

_PATIENCE_S = 30.0
"""For one call, such as reading the whole index. A server waits less, but here nobody is served."""
_CLOSE_S = 0.5


class SeenDirectory(StoreDirectory):
    """A directory without its lock: segments are opened for reading, and nothing is ever created."""

    def is_present(self) -> bool:
        return has_superblock(self.path)

    def open_segment(self, segment: int) -> OpenFile:
        return self.open_to_read(segment, self.direct)

    def file_system_size(self) -> tuple[int, int]:
        """Device number and size, bytes, of the file system where the directory is, or would be. Raises OSError."""
        place = self.place()
        found = os.statvfs(place)
        return place.stat().st_dev, found.f_blocks * found.f_frsize

    def check_writable(self) -> None:
        """Whether the directory can be made, or, if it is ours, made writable. Raises OSError."""
        place = self.place()
        number = 0
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            number = errno.EROFS
        elif place != self.path and not os.access(place, os.W_OK | os.X_OK):
            number = errno.EACCES
        if number:
            raise OSError(number, os.strerror(number), str(place))

    def read_blocks(self, segment: int, offsets: Sequence[int]) -> list[bytes]:
        """The blocks at ``offsets`` of a segment's file, through the page cache. Raises OSError."""
        file = self.open_to_read(segment, False)
        return [os.pread(file.fd, BLOCK, offset) for offset in offsets]

    def modes(self) -> dict[str, int]:
        """``st_mode`` of every entry, by name. Raises OSError."""
        found = {}
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                found[entry.name] = entry.stat(follow_symlinks=False).st_mode
        return found


class SilentHealth(Health):
    """For looking: what is wrong is shown, not logged, and many bad sectors are no reason to stop reading."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Counters(), retry_s=1.0)

    def failed(self, error: OSError, *, writing: bool) -> None:
        if error.errno in GONE_ERRNOS:
            self.take_out(error.strerror or str(error))

    def take_out(self, reason: str) -> None:
        if self.condition is not Condition.OUT:
            self.condition, self.reason = Condition.OUT, reason


@dataclass(slots=True, kw_only=True)
class Seen(Found):
    """One directory as it was found; without a superblock ``volume.health.reason`` says why."""

    directory: SeenDirectory
    exists: bool = False
    """Whether there is a directory that answers, whatever is in it."""
    num_ranks: int | None = None
    """Of a server whose ranks have their stores below it; None: there are none."""


@dataclass(slots=True)
class _Candidate(Found):
    """A directory before a start."""

    place: Path | None = None
    """Where its path leads; None: that does not answer."""
    device: int | None = None
    """Of its file system; None: it does not answer."""
    total_bytes: int = 0
    holder: LockHolder | None = None
    error: OSError | None = None
    damage: StoreFormatError | None = None
    """Why its superblock cannot be understood."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a start will find."""

    holders: dict[Path, LockHolder]
    """Who has directories locked."""
    most_bytes: int | None
    """What their file systems have above the floor, when nothing else is on them; None if one does not answer."""


@dataclass(frozen=True, slots=True)
class Sight:
    """All directories of a store, by stripe, and what they agree on."""

    seen: list[Seen]
    identity: StoreIdentity

    @property
    def volumes(self) -> list[Volume]:
        return [item.volume for item in self.seen]

    def close(self) -> None:
        close_all(self.seen)


def look_at(dirs: Sequence[Path]) -> Sight:
    """Find out which store lies in ``dirs``, given in any order.

    Directories that are missing, sick or without a superblock are out, and fill the places that are left.

    Raises:
        StoreFormatError: no store, not one store, not all of its directories, or one of another format.
    """
    seen = look_at_each(dirs)
    try:
        if all(item.superblock is None for item in seen):
            raise StoreFormatError("\n".join(_no_store(item) for item in seen))
        identity = agreed(seen)
    except StoreFormatError:
        close_all(seen)
        raise
    return Sight(in_place(seen, identity.num_stripes), identity)


def look_at_each(dirs: Sequence[Path]) -> list[Seen]:
    """Each directory for itself, in the order given; see :func:`close_all`.

    Raises:
        StoreFormatError: one of them has another format.
    """
    seen: list[Seen] = []
    try:
        for path in dirs:
            seen.append(_look(path))
            if seen[-1].superblock is not None:
                check_format(path, seen[-1].superblock)
    except StoreFormatError:
        close_all(seen)
        raise
    return seen


def close_all(seen: Sequence[Seen]) -> None:
    """Look no more: the threads end, but for those that hang."""
    for item in seen:
        item.volume.close(_CLOSE_S)


def look_ahead(config: StoreConfig) -> Ahead:
    """What a start will find in its directories; what it would be refused for is an error now.

    What does not answer in time is left to the start.

    Raises:
        StoreFormatError: a directory is not ours to use, they are not one store of this format, or one that is needed
            cannot be written.
        ConfigError: its file system is smaller than the floor, or two of them are not two directories.
    """
    found = [_look_before_start(path, config) for path in config.dirs]
    with _naming_dirs():
        check_distinct([item.place for item in found if item.place is not None])
    if all(item.superblock is None for item in found):
        _check_new(found)
    else:  # it goes on with those that are well
        agreed_at_start(found)
    rooms = {item.device: item.total_bytes - config.floor_of(item.total_bytes) for item in found}
    holders = {item.volume.path: item.holder for item in found if item.holder is not None}
    return Ahead(holders, None if None in rooms else sum(rooms.values()))


def _look_before_start(path: Path, config: StoreConfig) -> _Candidate:
    directory = SeenDirectory(path)
    volume = Volume(directory, SilentHealth(path), config.io_timeout_s)
    found = _Candidate(volume)
    try:
        with _naming_dirs():
            found.place = volume.probe(partial(real_place, path))
        volume.probe(partial(check_shared, path))
        volume.probe(partial(check_may_begin, path))
        found.device, found.total_bytes = volume.probe(directory.file_system_size)
        if config.floor_of(found.total_bytes) >= found.total_bytes:
            raise ConfigError(
                f"--hcache-disk-free-floor: {config.floor_text} is not allowed; the file system of "
                f"{path} has {format_bytes(found.total_bytes)}"
            )
        volume.probe(directory.check_writable)
        volume.probe(directory.check_ours)
        found.holder = volume.probe(directory.lock.holder)
        try:
            found.superblock = volume.probe(directory.read_superblock)
        except StoreFormatError as error:
            found.damage = error
    except FileNotFoundError:
        pass  # it will be made
    except OSError as error:
        found.error = error
    finally:
        volume.close(config.io_timeout_s)
    return found


@contextlib.contextmanager
def _naming_dirs() -> Iterator[None]:
    """A ValueError is one of the flag's value. Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"--hcache-dirs: {error}") from None


def _check_new(found: Sequence[_Candidate]) -> None:
    """Of a store that does not exist yet every directory must be usable. Raises StoreFormatError."""
    for item in found:
        if item.damage is not None:
            raise item.damage
        if item.error is not None and item.error.errno == errno.ENODEV:
            raise StoreFormatError(f"cannot use {item.volume.path} (--hcache-dirs): {item.error.strerror}")
    sick = {item.volume.path: item.error for item in found if item.error is not None}
    if sick and all(error.errno in (errno.EACCES, errno.EROFS) for error in sick.values()):
        path, why = next(iter(sick.items()))
        raise StoreFormatError(f"cannot write to {path} (--hcache-dirs): {why}")


def _look(path: Path) -> Seen:
    directory = SeenDirectory(path)
    volume = Volume(directory, SilentHealth(path), _PATIENCE_S)
    seen = Seen(volume, directory=directory)
    try:
        is_empty = volume.probe(directory.is_empty)
        seen.exists = True
        seen.superblock = volume.probe(directory.read_superblock)
        if seen.superblock is None:
            seen.num_ranks = min(volume.probe(partial(ranks_in, path)), default=None)
    except StoreFormatError:
        volume.health.take_out("its superblock is damaged")
        return seen
    except OSError as error:
        gone = error.errno == errno.ENOENT
        volume.health.take_out("it does not exist" if gone else error.strerror or str(error))
        return seen
    if seen.num_ranks is not None:
        first = rank_dir(path, 0, seen.num_ranks).name
        volume.health.take_out(
            f"it holds those of the ranks of a server: {first} and so on; name that of one rank, in each directory"
        )
    elif seen.superblock is None:
        volume.health.take_out("it is empty: is its disk mounted?" if is_empty else "it has no superblock")
    return seen


def _no_store(item: Seen) -> str:
    text = f"{item.volume.path} is not a directory of a store: {item.volume.health.reason}"
    try:
        if item.exists and item.volume.probe(item.directory.segment_sizes):
            text += "; it has segments, `hcache store fsck --rebuild` may save them"
    except OSError:
        pass
    return text
