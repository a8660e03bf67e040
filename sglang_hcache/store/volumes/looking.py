"""Looking at a store's directories without their locks: nothing is written, and one that is sick is only reported."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.store.format.geometry import BLOCK
from sglang_hcache.store.format.names import SUPERBLOCK_NAME
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.volumes.agreement import Found, agreed, check_format, in_place, ranks_in
from sglang_hcache.store.volumes.directory import StoreDirectory, check_private, has_superblock
from sglang_hcache.store.volumes.health import GONE_ERRNOS, Condition, Health
from sglang_hcache.store.volumes.mounts import is_read_only
from sglang_hcache.store.volumes.volume import Volume

_PATIENCE_S = 30.0
"""For one call, or a piece of one that says that it goes on. A server waits less, but here nobody is served."""
_CLOSE_S = 0.5


class SeenDirectory(StoreDirectory):
    """A directory without its lock, in which nothing can be created."""

    def is_present(self) -> bool:
        return has_superblock(self.path)

    def file_system_size(self) -> tuple[int, int]:
        """Device number and size, bytes, of the file system where the directory is, or would be. Raises OSError."""
        place = self.place()
        found = os.statvfs(place)
        return place.stat().st_dev, found.f_blocks * found.f_frsize

    def check_writable(self) -> None:
        """Whether the directory can be made, or, if it is ours, made writable. Raises OSError."""
        place = self.place()
        number = 0
        if is_read_only(place):
            number = errno.EROFS
        elif place != self.path and not os.access(place, os.W_OK | os.X_OK):
            number = errno.EACCES
        if number:
            raise OSError(number, os.strerror(number), str(place))

    def refusal(self) -> str:
        """Why its user, who is another one if root looks, can start no server on it: owner or mode. Raises OSError."""
        user = os.geteuid() or (self.path / SUPERBLOCK_NAME).stat().st_uid
        try:
            check_private(self.path, user)
        except StoreFormatError as error:
            return str(error)
        return ""

    def first_block(self, segment: int) -> bytes:
        """Of a segment's file, through the page cache. Raises OSError."""
        file = self.open_to_read(segment, False)
        return os.pread(file.fd, BLOCK, 0)

    def names(self) -> set[str]:
        """Of every entry. Raises OSError."""
        return {entry.name for entry in self._entries()}


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
    """How many ranks a server has whose stores are below it; None: there are none."""


@dataclass(frozen=True, slots=True)
class Sight:
    """All directories of a store, by stripe, and what they agree on."""

    seen: list[Seen]
    identity: StoreIdentity

    @property
    def volumes(self) -> list[Volume]:
        return [item.volume for item in self.seen]

    def first_segment(self) -> int:
        """Segments below are cleared by now, as far as directories answer: a server may have done it meanwhile."""
        found = [self.identity.first_segment]
        for item in self.seen:
            if item.volume.health.readable:
                with contextlib.suppress(OSError, StoreFormatError):
                    block = item.volume.attempt(item.directory.read_superblock)
                    found += [] if block is None else [block.identity.first_segment]
        return max(found)

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
    except StoreFormatError as error:
        close_all(seen)
        raise StoreFormatError(
            f"{error}; to remove that store, stop its server and delete all that is in its directories (of every rank)"
        ) from None
    return seen


def close_all(seen: Sequence[Seen]) -> None:
    """Look no more: the threads end, but for those that hang."""
    for item in seen:
        item.volume.close(_CLOSE_S)


def _look(path: Path) -> Seen:
    directory = SeenDirectory(path)
    volume = Volume(directory, SilentHealth(path), _PATIENCE_S)
    seen = Seen(volume, directory=directory)
    try:
        is_empty = volume.attempt(directory.is_empty)
        seen.exists = True
        seen.superblock = volume.attempt(directory.read_superblock)
        if seen.superblock is None:
            seen.num_ranks = min(volume.attempt(partial(ranks_in, path)), default=None)
    except StoreFormatError as error:
        seen.damage = error
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
        if item.exists and item.volume.attempt(item.directory.segment_sizes):
            text += "; it has segments, `hcache store fsck --rebuild` may save them"
    except OSError:
        pass
    return text
