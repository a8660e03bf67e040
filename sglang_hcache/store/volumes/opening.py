"""Opening all directories of a store as one: same store, every one in its place, the sick ones left out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import StoreError, StoreFormatError, StoreIOError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.superblock import StoreIdentity, Superblock
from sglang_hcache.store.volumes.agreement import Found, agreed, in_place
from sglang_hcache.store.volumes.directory import StoreDirectory, has_superblock
from sglang_hcache.store.volumes.health import READ_ONLY_ERRNOS, Health
from sglang_hcache.store.volumes.mounts import check_mounted_as_listed, mount_of
from sglang_hcache.store.volumes.volume import Volume, in_each

logger = logging.getLogger(__name__)


def open_volumes(config: StoreConfig, observer: Observer) -> tuple[list[Volume], StoreIdentity]:
    """Lock and check the directories, initialising new ones; volumes by stripe, and what they agree on.

    Directories of an existing store that fail, hang or have no superblock are left out: the keeper takes them in again.

    Raises:
        StoreFormatError, StoreLockedError, StoreIOError: no lock is kept.
    """
    volumes = [
        Volume(
            StoreDirectory(path, config.user_pid, may_make=config.makes_dirs),
            Health(path, observer, config.retry_s),
            config.io_timeout_s,
        )
        for path in config.dirs
    ]
    try:
        found = _acquire_all(volumes)
        known = [item for item in found if item.superblock is not None]
        _check_damage(found, bool(known))
        identity = agreed_at_start(found) if known else _new_identity(volumes, config)
        found = in_place(found, identity.num_stripes)
        volumes = [item.volume for item in found]
        for item in found:
            volume = item.volume
            if known and item.superblock is None and volume.health.readable:
                volume.health.take_out("it has no superblock")
            if volume.health.readable:
                _ready(volume, identity, is_new=not known)
            volume.health.has_worked = volume.health.readable
        if not any(volume.health.readable for volume in volumes):
            raise StoreIOError(f"cannot use {volumes[0].path} (--hcache-dirs): {volumes[0].health.reason}")
        if not known:
            _tell_places(volumes)
        agree = all(item.superblock.identity == identity for item in known if item.superblock is not None)
        return volumes, _updated(volumes, identity, config, agree)
    except BaseException:
        for volume in volumes:
            volume.close(config.io_timeout_s)
        raise


def publish(volumes: Sequence[Volume], identity: StoreIdentity) -> None:
    """Write ``identity`` to every directory that takes writes. Raises StoreError if none took it."""
    in_each(
        [volume for volume in volumes if volume.health.writable],
        lambda volume: volume.directory.write_superblock(Superblock(identity, volume.stripe)),
        "cannot write the superblock",
    )


def take_again(volume: Volume, identity: StoreIdentity) -> tuple[StoreIdentity, OSError | None]:
    """Check a directory that was out: the same store and place, or emptied on the file system where it was.

    Segments without a superblock are what a deletion left that is not finished: whoever takes it in compares them. At
    start nobody knows whose they are, so a directory that has been out since then is left to ``fsck``.

    Returns:
        What it said of the store: more than ``identity`` if others were not there when it was written. And why it takes
        no writes, where all else works.

    Raises:
        StoreFormatError, StoreLockedError, OSError: it cannot be used (yet).
    """
    directory = volume.directory
    _check_mounted(directory, identity.file_systems[volume.stripe])
    directory.acquire()
    found = directory.read_superblock()
    if found is None:
        if not volume.health.has_worked and not directory.is_empty():
            raise OSError(
                errno.EUCLEAN, "it has no superblock; `hcache store fsck --rebuild` makes a new one"
            )
        directory.write_superblock(Superblock(identity, volume.stripe))
        directory.probe()
        return identity, None
    if (found.identity.store_id, found.stripe) != (identity.store_id, volume.stripe):
        raise StoreFormatError(f"{directory.path} belongs to another store now")
    try:
        if found.identity.epoch < identity.epoch:
            # A clearing that only this directory knows of stays there until all know it.
            first_segment = max(identity.first_segment, found.identity.first_segment)
            directory.write_superblock(
                Superblock(replace(identity, first_segment=first_segment), volume.stripe)
            )
        directory.probe()
    except OSError as error:
        if error.errno not in READ_ONLY_ERRNOS:
            raise
        directory.probe_reading()
        return found.identity, error  # without the new superblock it is as it is after a crash now
    return found.identity, None


def check_may_begin(path: Path) -> None:
    """Raises OSError: a directory is of no store yet, and the disk that is listed for it is not mounted."""
    if not has_superblock(path):
        check_mounted_as_listed(path)


def _acquire_all(volumes: Sequence[Volume]) -> list[Found]:
    """In the order of their paths: else two servers that name them differently could each lock some, and both fail.

    Of a store that exists only what has a superblock: whether the disks of the others are mounted is not known yet.
    """
    in_order = sorted(volumes, key=lambda item: os.path.abspath(item.path))
    begun = {volume for volume in in_order if _has_begun(volume)}
    found = {volume: _acquire(volume) for volume in in_order if not begun or volume in begun}
    return [found.get(volume, Found(volume)) for volume in volumes]


def _has_begun(volume: Volume) -> bool:
    """Whether it has a superblock; a device that fails, or is not mounted as listed, is taken out."""

    def look() -> bool:
        check_may_begin(volume.path)
        return has_superblock(volume.path)

    try:
        return volume.attempt(look)
    except OSError as error:
        volume.health.take_out(error.strerror or str(error))
        return False


def _acquire(volume: Volume) -> Found:
    """Lock the directory and read its superblock; a device that fails is taken out, and one that is out stays so."""
    directory = volume.directory
    if not volume.health.readable:
        return Found(volume)
    try:
        volume.attempt(directory.acquire)
        try:
            return Found(volume, volume.attempt(directory.read_superblock))
        except StoreFormatError as error:
            return Found(volume, damage=error)
    except OSError as error:
        volume.health.take_out(error.strerror or str(error))
        return Found(volume)


def _check_damage(found: Sequence[Found], is_known: bool) -> None:
    """Leave out directories whose superblock is damaged, if others say what the store is."""
    for item in found:
        if item.damage is not None:
            if not is_known:
                raise item.damage
            item.volume.health.take_out(
                "its superblock is damaged; `hcache store fsck --rebuild` makes a new one"
            )


def agreed_at_start(found: Sequence[Found]) -> StoreIdentity:
    """As :func:`agreed`, for a server. Raises StoreFormatError."""
    try:
        return agreed(found)
    except StoreFormatError as error:
        # In the others is nothing of a store.
        stores = [str(item.volume.path) for item in found if item.superblock is not None or item.damage]
        raise StoreFormatError(
            f"--hcache-dirs: {error}. To start an empty store, use new directories, or stop the server of the old ones "
            f"and delete all that is in {', '.join(stores)} (and in those of other ranks)"
        ) from None


def lost_superblock(path: Path) -> StoreFormatError:
    """Of a directory that has segments, and no other one says which store they are of."""
    return StoreFormatError(
        f"--hcache-dirs: {path} has segments but no superblock; `hcache store fsck --rebuild` with all directories of "
        "the store may save them; to start an empty store, delete them by hand"
    )


def _new_identity(volumes: Sequence[Volume], config: StoreConfig) -> StoreIdentity:
    """For a store that does not exist yet: every directory must be there, and empty."""
    for volume in volumes:
        if not volume.health.readable:
            raise StoreIOError(f"cannot use {volume.path} (--hcache-dirs): {volume.health.reason}")
        if volume.attempt(volume.directory.segment_sizes):
            raise lost_superblock(volume.path)
    return StoreIdentity(
        store_id=uuid.uuid4().hex,
        epoch=0,
        first_segment=0,
        file_systems=tuple(volume.attempt(volume.directory.file_system) for volume in volumes),
        size_bytes=config.size_bytes,
        segment_bytes=config.segment_bytes,
        free_floor_bytes=config.free_floor_bytes,
        free_floor_percent=config.free_floor_percent,
    )


def _tell_places(volumes: Sequence[Volume]) -> None:
    """Log where a new store is: if another one was expected there, its disk is not mounted."""
    for volume in volumes:
        with contextlib.suppress(OSError):
            mount = volume.attempt(partial(mount_of, volume.path)) or "an unknown file system"
            free = format_bytes(volume.attempt(volume.directory.free_bytes))
            logger.info("hcache: %s begins a new store, on %s, %s free", volume.path, mount, free)


def _ready(volume: Volume, identity: StoreIdentity, *, is_new: bool) -> None:
    """Bring a directory into use; one that cannot be is left out, or refused if the store is new."""
    directory = volume.directory
    try:
        if is_new:
            volume.attempt(partial(directory.write_superblock, Superblock(identity, volume.stripe)))
        volume.attempt(directory.probe)
    except OSError as error:
        if is_new:
            raise StoreIOError(f"cannot write to {volume.path} (--hcache-dirs): {error}") from error
        volume.health.failed(error, writing=True)
        try:
            if error.errno not in READ_ONLY_ERRNOS:
                raise  # one failure is not many, but nothing has ever worked here
            volume.attempt(directory.probe_reading)
        except OSError as failure:
            volume.health.take_out(failure.strerror or str(failure))


def _check_mounted(directory: StoreDirectory, file_system: int) -> None:
    """Before anything is created there.

    Raises:
        OSError: it has no superblock and is, or would be, on another file system than before.
    """
    if has_superblock(directory.path):
        return
    if os.statvfs(directory.place()).f_fsid != file_system:
        raise OSError(
            errno.ENODEV,
            "it is empty and on another file system than before: is the disk mounted? If it was replaced, "
            "`hcache store fsck --rebuild` takes the empty one in",
        )


def _updated(
    volumes: Sequence[Volume], identity: StoreIdentity, config: StoreConfig, agree: bool
) -> StoreIdentity:
    """``identity`` with this start's settings, written down if they are new or the directories do not agree."""
    file_systems = list(identity.file_systems)
    for volume in volumes:
        with contextlib.suppress(StoreError):
            file_systems[volume.stripe] = volume.call(
                volume.directory.file_system, "cannot ask for its identity"
            )
    changed = identity.next(
        file_systems=tuple(file_systems),
        size_bytes=config.size_bytes,
        segment_bytes=config.segment_bytes,
        free_floor_bytes=config.free_floor_bytes,
        free_floor_percent=config.free_floor_percent,
    )
    if agree and changed == identity.next():
        return identity
    try:
        publish(volumes, changed)
    except StoreError as error:
        logger.warning("hcache: the superblocks could not be brought up to date: %s", error)
    return changed
