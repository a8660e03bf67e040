"""What a start will find in its directories: looked at before the model is loaded, which takes minutes."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError, StoreFormatError
from sglang_hcache.core.paths import check_distinct, real_place
from sglang_hcache.core.units import exact_size, format_bytes
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.volumes.agreement import Found, check_shared
from sglang_hcache.store.volumes.directory import has_superblock
from sglang_hcache.store.volumes.lock import LockHolder
from sglang_hcache.store.volumes.looking import SeenDirectory, SilentHealth
from sglang_hcache.store.volumes.mounts import mount_of
from sglang_hcache.store.volumes.opening import agreed_at_start, check_may_begin, lost_superblock
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Candidate(Found):
    """A directory before a start."""

    place: Path | None = None
    """Where its path leads; None: that does not answer."""
    device: int | None = None
    """Device number of its file system; None: it does not answer."""
    total_bytes: int = 0
    holder: LockHolder | None = None
    has_segments: bool = False
    """Looked for where there is no superblock."""
    error: OSError | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What a start will find."""

    holders: dict[Path, LockHolder]
    """Who has directories locked."""
    most_bytes: int | None
    """What their file systems have above the floor, when nothing else is on them; None if one does not answer."""


def look_ahead(config: StoreConfig) -> Preview:
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
    return Preview(holders, None if None in rooms else sum(rooms.values()))


def _look_before_start(path: Path, config: StoreConfig) -> _Candidate:
    directory = SeenDirectory(path)
    volume = Volume(directory, SilentHealth(path), config.io_timeout_s)
    found = _Candidate(volume)
    try:
        with _naming_dirs():
            found.place = volume.attempt(partial(real_place, path))
        volume.attempt(partial(check_shared, path))
        volume.attempt(partial(check_may_begin, path))
        found.device, found.total_bytes = volume.attempt(directory.file_system_size)
        if config.floor_of(found.total_bytes) >= found.total_bytes:
            raise ConfigError(
                f"--hcache-disk-free-floor: {config.floor_text} is not allowed; the file system of "
                f"{path} has {format_bytes(found.total_bytes)}; {_way_out(found.total_bytes)}"
            )
        mount = volume.attempt(partial(mount_of, path))
        if mount is not None and mount.kind in ("tmpfs", "ramfs"):
            logger.warning(
                "hcache: %s (--hcache-dirs) is on %s, which is memory: it counts against the memory of this machine or "
                "container beside --hcache-host-size, and is gone after a reboot", path, mount.kind,
            )  # fmt: skip
        # What is stored is served, whether or not it grows.
        if not volume.attempt(partial(has_superblock, path)):
            volume.attempt(directory.check_writable)
        volume.attempt(directory.check_ours)
        found.holder = volume.attempt(directory.lock.holder)
        try:
            found.superblock = volume.attempt(directory.read_superblock)
            if found.superblock is None:
                found.has_segments = bool(volume.attempt(directory.segment_sizes))
        except StoreFormatError as error:
            found.damage = error
    except FileNotFoundError:
        pass  # it will be made
    except OSError as error:
        found.error = error
    finally:
        volume.close(config.io_timeout_s)
    return found


def _way_out(total_bytes: int) -> str:
    elsewhere = "put --hcache-dirs elsewhere"
    if not total_bytes:  # as /proc: a share of it is no less than all of it
        return elsewhere
    default = exact_size(HCacheConfig.model_fields["disk_free_floor"].default)
    return f"set a smaller floor, such as --hcache-disk-free-floor 10% (the default is {default}), or {elsewhere}"


@contextlib.contextmanager
def _naming_dirs() -> Iterator[None]:
    """A ValueError is one of the flag's value. Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"--hcache-dirs: {error}") from None


def _check_new(found: Sequence[_Candidate]) -> None:
    """Every directory of a store that does not exist yet must be usable. Raises StoreFormatError."""
    for item in found:
        if item.damage is not None:
            raise item.damage
        # The superblock of one that does not answer may say whose they are.
        if item.has_segments and all(other.error is None for other in found):
            raise lost_superblock(item.volume.path)
        if item.error is not None and item.error.errno == errno.ENODEV:
            raise StoreFormatError(f"cannot use {item.volume.path} (--hcache-dirs): {item.error.strerror}")
    sick = {item.volume.path: item.error for item in found if item.error is not None}
    if sick and all(error.errno in (errno.EACCES, errno.EROFS) for error in sick.values()):
        path, why = next(iter(sick.items()))
        raise StoreFormatError(f"cannot write to {path} (--hcache-dirs): {why}")
