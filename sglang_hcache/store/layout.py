"""Opening all directories of a store as one: same store, right order, right number."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError, StoreIOError
from sglang_hcache.store.directory import StoreDirectory, Superblock
from sglang_hcache.store.record import FORMAT_VERSION


def open_directories(paths: Sequence[Path]) -> tuple[list[StoreDirectory], str]:
    """Lock and check ``paths``, initialising them when they are new; returns them and the store's id.

    Raises:
        StoreFormatError, StoreLockedError, StoreIOError: no lock is kept.
    """
    directories: list[StoreDirectory] = []
    try:
        for stripe, path in enumerate(paths):
            directories.append(StoreDirectory.acquire(path, stripe))
        store_id = _agree(directories)
        for directory in directories:
            directory.probe_direct()
    except OSError as error:
        _release(directories)
        raise StoreIOError(f"cannot open the store in {', '.join(map(str, paths))}: {error}") from error
    except BaseException:
        _release(directories)
        raise
    return directories, store_id


def _release(directories: Sequence[StoreDirectory]) -> None:
    for directory in directories:
        directory.release()


def _agree(directories: Sequence[StoreDirectory]) -> str:
    """Check every superblock against its place; write those that are missing in a new store."""
    found = [(directory, directory.read_superblock()) for directory in directories]
    known = [(directory, block) for directory, block in found if block is not None]
    for directory, block in known:
        _check(directory, block, len(directories))
    store_ids = {block.store_id for _, block in known}
    if len(store_ids) > 1:
        raise StoreFormatError(
            "--hcache-dirs mixes directories of different stores: "
            + ", ".join(f"{directory.path} is of {block.store_id[:8]}" for directory, block in known)
        )
    new = [directory for directory, block in found if block is None]
    if new:
        if any(directory.segment_sizes() for directory in directories):
            raise StoreFormatError(
                f"{new[0].path} has no superblock although the store holds data; if its disk was replaced "
                "or emptied, delete the files of all --hcache-dirs to start an empty store"
            )
        for directory in new:
            directory.check_no_strangers()
    store_id = store_ids.pop() if store_ids else uuid.uuid4().hex
    for directory in new:
        directory.write_superblock(Superblock(store_id, directory.stripe, len(directories)))
    return store_id


def _check(directory: StoreDirectory, block: Superblock, num_stripes: int) -> None:
    if block.format_version != FORMAT_VERSION:
        raise StoreFormatError(
            f"{directory.path} has store format {block.format_version}, this version reads "
            f"{FORMAT_VERSION}; use another directory, or delete its files"
        )
    if (block.stripe, block.num_stripes) != (directory.stripe, num_stripes):
        raise StoreFormatError(
            f"{directory.path} is directory {block.stripe + 1} of {block.num_stripes} of its store, but "
            f"--hcache-dirs names it as {directory.stripe + 1} of {num_stripes}; restore the old list and "
            "order, or delete the files of all these directories to start an empty store"
        )
