"""Making a store whole again from what its segments say: lost superblocks, replaced disks."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sglang_hcache.core.errors import (
    CorruptExtentError,
    StoreFormatError,
    StoreIOError,
)
from sglang_hcache.core.observer import Counters
from sglang_hcache.store.format.names import STATE_NAME
from sglang_hcache.store.format.record import ExtentHeader, parse_header
from sglang_hcache.store.format.superblock import StoreIdentity, Superblock
from sglang_hcache.store.inspect.maintenance import config_of
from sglang_hcache.store.store import DiskStore
from sglang_hcache.store.volumes.agreement import agreed, in_place
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.looking import Seen, close_all, look_at_each


def rebuild(dirs: Sequence[Path]) -> list[str]:
    """Write superblocks that are missing or damaged, then the state anew from the headers; says what was done.

    A directory without a superblock is taken in if it is empty, as a new disk is, or if its segments are of
    this store. Runs that are not complete are forgotten, and so are counts and quarantine, which only the
    state knew.

    Raises:
        StoreLockedError: a server runs.
        StoreError: a directory is missing, or is not of this store.
    """
    try:
        _check_something_is_there(dirs)
        identity, seen, done = _prepare(dirs)
    except OSError as error:
        raise StoreIOError(f"cannot change the store: {error}") from error
    counters = Counters()
    store = DiskStore.open(config_of(identity, [item.volume.path for item in seen]), counters)
    try:
        store.delete_leftovers()
        stats = store.stats()
    finally:
        store.close()
    done.append(f"{stats.runs} runs with {stats.chunks} chunks are complete")
    return done


def _check_something_is_there(dirs: Sequence[Path]) -> None:
    """Before anything is changed, and be it the mode of a directory.

    Raises:
        StoreIOError: a directory is missing.
        OSError: it does not answer.
        StoreFormatError: in none is anything of a store.
    """
    seen = look_at_each(dirs)
    close_all(seen)
    for item in seen:
        if not item.exists:
            raise StoreIOError(
                f"{item.volume.path}: {item.volume.health.reason}; mount its disk, or make an empty directory "
                "there if it was replaced"
            )
    names = ", ".join(str(item.volume.path) for item in seen)
    if not any(item.superblock is not None or item.directory.segment_sizes() for item in seen):
        raise StoreFormatError(f"no store is in {names}: neither a readable superblock nor a segment")


def _prepare(dirs: Sequence[Path]) -> tuple[StoreIdentity, list[Seen], list[str]]:
    """Under the locks: write superblocks, remove states. Raises OSError, StoreError."""
    with contextlib.ExitStack() as stack:
        locked: dict[Path, StoreDirectory] = {}
        for path in dirs:
            locked[path] = StoreDirectory(path)
            locked[path].acquire()
            stack.callback(locked[path].lock.release)
        seen = look_at_each(dirs)  # again: now nobody changes it
        stack.callback(close_all, seen)
        identity, done = _take_in(seen)
        seen = in_place(seen, identity.num_stripes)
        for item in seen:
            locked[item.volume.path].write_superblock(Superblock(identity, item.volume.stripe))
            (item.volume.path / STATE_NAME).unlink(missing_ok=True)
    return identity, seen, done


def _take_in(seen: Sequence[Seen]) -> tuple[StoreIdentity, list[str]]:
    """Give a place to every directory that has no superblock; what all shall agree on, and what is new."""
    done: list[str] = []
    headers = {item.volume.path: _first_headers(item) for item in seen}
    if any(item.superblock is not None for item in seen):
        identity = agreed(seen)
    else:
        identity = _guessed(seen, headers)
        done.append("no superblock was left: the settings are guessed until a server brings its own")
    for item in seen:
        if item.superblock is not None:
            continue
        path = item.volume.path
        others = {
            header.place.run_id
            for other in seen
            if other is not item
            for header in headers[other.volume.path]
        }
        _place(item, headers[path], others, identity, alone=len(seen) == 1)
    stripes = [item.superblock.stripe for item in seen if item.superblock is not None]
    if len(set(stripes)) < len(stripes):
        raise StoreFormatError("two of these directories hold the same part of a store; give the right ones")
    for item in in_place(seen, identity.num_stripes):
        if not item.volume.health.readable:
            kind = "with its segments" if headers[item.volume.path] else "empty"
            done.append(f"took {item.volume.path} in as directory {item.volume.stripe}, {kind}")
    file_systems = tuple(item.directory.file_system() for item in in_place(seen, identity.num_stripes))
    return identity.next(file_systems=file_systems), done


def _place(
    item: Seen, headers: Sequence[ExtentHeader], known: set[bytes], identity: StoreIdentity, *, alone: bool
) -> None:
    """Put a directory where its segments belong; without segments it goes where there is room.

    Raises:
        StoreFormatError: they are not of this store.
    """
    path = item.volume.path
    if not headers:
        if item.directory.segment_sizes():
            raise StoreFormatError(f"{path} holds segments without a readable header; delete its files first")
        return
    stripes = {(header.stripe, header.place.shape.num_stripes) for header in headers}
    ours = alone or any(header.place.run_id in known for header in headers)
    stripe, num_stripes = min(stripes)
    if not ours or len(stripes) > 1 or num_stripes != identity.num_stripes:
        raise StoreFormatError(f"{path} holds segments of another store; give the right directory")
    item.superblock = Superblock(identity, stripe)


def _first_headers(item: Seen) -> list[ExtentHeader]:
    """What stands at the beginning of each segment file, if it is a header."""
    found = []
    for segment in item.volume.attempt(item.directory.segment_sizes):
        try:
            block = item.volume.attempt(partial(item.directory.first_block, segment))
            header = parse_header(block)
        except (CorruptExtentError, OSError):
            continue
        if header.place.segment == segment:
            found.append(header)
    return found


def _guessed(seen: Sequence[Seen], headers: dict[Path, list[ExtentHeader]]) -> StoreIdentity:
    """An identity for segments whose superblocks are all lost, so large that opening the store evicts nothing.

    Raises:
        StoreFormatError: there is nothing to go by, or a directory is not named.
    """
    counts = {header.place.shape.num_stripes for found in headers.values() for header in found}
    if not counts:
        raise StoreFormatError(
            f"no segment in {seen[0].volume.path} has a readable header; nothing can be rebuilt"
        )
    if counts != {len(seen)}:
        raise StoreFormatError(
            f"the segments are of a store of {max(counts)} directories, and {len(seen)} are named; name all of them"
        )
    sizes = [size for item in seen for size in item.directory.segment_sizes().values()]
    segment_bytes = max(2**20, max(sizes) * len(seen))
    return StoreIdentity(
        store_id=uuid.uuid4().hex,
        epoch=0,
        first_segment=0,
        file_systems=(0,) * len(seen),
        size_bytes=2 * sum(item.directory.allocated_bytes() for item in seen) + 4 * segment_bytes + 2**24,
        segment_bytes=segment_bytes,
        free_floor_bytes=0,
        free_floor_percent=0.0,
    )
