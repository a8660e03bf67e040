"""Directories of the ranks of one server: each rank has a store of its own, below a directory that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.paths import rank_dir, ranks_named_by
from sglang_hcache.store.io.workers import DeadlineCaller
from sglang_hcache.store.volumes.directory import has_superblock

_PATIENCE_S = 10.0
"""To list a directory. One that takes longer is taken for what the others are."""


def check_shared(path: Path) -> None:
    """Whether ``path``, if it is a rank's, has nothing beside it that would count for no cap.

    Raises:
        StoreFormatError: a store of servers with another number of ranks.
        OSError: the directory above cannot be asked.
    """
    num_ranks, shared = ranks_named_by(path.name), path.parent
    if num_ranks is None or not shared.exists():
        return
    others = {1} if has_superblock(shared) else ranks_in(shared) - {num_ranks}
    if others:
        raise StoreFormatError(
            f"{shared} holds what a server with --tp-size {min(others)} stored, which one with --tp-size {num_ranks} "
            "cannot use; give --hcache-dirs another directory, or remove what is in this one"
        )


def ranks_in(shared: Path) -> set[int]:
    """The numbers of ranks of which one has a store below ``shared``. Raises OSError."""
    found = ((name, ranks_named_by(name)) for name in os.listdir(shared))
    return {number for name, number in found if number is not None and has_superblock(shared / name)}


def stores_in(dirs: Sequence[Path]) -> list[tuple[Path, ...]]:
    """The directories of each store in ``dirs``: they themselves, or those of rank 0, 1 and so on below them.

    A directory that is missing, or does not answer, is taken for what the others are.

    Raises:
        StoreFormatError: they are not all of one kind.
    """
    found = {path: _numbers_in(path) for path in dirs}
    numbers = set[int]().union(*found.values())
    if len(numbers) > 1:
        kinds = "; ".join(
            f"{path} holds {' and '.join(map(_kind, sorted(here)))}" for path, here in found.items() if here
        )
        raise StoreFormatError(
            f"these are not the directories of one server: {kinds}. Name those of one; of a rank alone its own in each"
        )
    num_ranks = next(iter(numbers), 1)
    return [tuple(rank_dir(path, rank, num_ranks) for path in dirs) for rank in range(num_ranks)]


def _numbers_in(path: Path) -> set[int]:
    """As :func:`ranks_in`, and 1 for a store of its own."""
    caller = DeadlineCaller("hcache-look")
    try:
        is_store, numbers = caller.call(lambda: (has_superblock(path), ranks_in(path)), _PATIENCE_S)
    except OSError:
        return set()
    finally:
        caller.close(0.0)
    return numbers | ({1} if is_store else set())


def _kind(num_ranks: int) -> str:
    if num_ranks == 1:
        return "a store of its own"
    return f"those of {num_ranks} ranks ({rank_dir(Path(), 0, num_ranks)} and so on)"
