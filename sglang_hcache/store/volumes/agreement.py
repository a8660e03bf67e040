"""Which directories belong together: to one store, and below one directory as stores of the ranks of a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.paths import rank_dir, ranks_named_by
from sglang_hcache.store.format.record import FORMAT_VERSION
from sglang_hcache.store.format.superblock import StoreIdentity, Superblock
from sglang_hcache.store.io.workers import DeadlineCaller
from sglang_hcache.store.volumes.directory import has_superblock
from sglang_hcache.store.volumes.volume import Volume

_PATIENCE_S = 10.0
"""To list a directory. One that takes longer is taken for what the others are."""


@dataclass(slots=True)
class Found:
    """A directory and what is known of it."""

    volume: Volume
    superblock: Superblock | None = None
    """None: missing or damaged."""
    damage: StoreFormatError | None = None
    """Why its superblock cannot be understood."""


F = TypeVar("F", bound=Found)


def agreed(found: Sequence[Found]) -> StoreIdentity:
    """What the superblocks say, of which there is one at least, once they are known to be all of one store.

    Raises:
        StoreFormatError: not one store, not all of its directories, or one of another format.
    """
    blocks = [(item.volume.path, item.superblock) for item in found if item.superblock is not None]
    for path, block in blocks:
        check_format(path, block)
    if len({block.identity.store_id for _, block in blocks}) > 1:
        names = ", ".join(f"{path} is of {block.identity.store_id[:8]}" for path, block in blocks)
        raise StoreFormatError(f"these are directories of different stores: {names}")
    places: dict[int, Path] = {}
    for path, block in blocks:
        if block.stripe in places:
            raise StoreFormatError(f"{places[block.stripe]} and {path} are both directory {block.stripe}")
        places[block.stripe] = path
    identity = max((block.identity for _, block in blocks), key=lambda item: (item.epoch, item.first_segment))
    if len(found) != identity.num_stripes:
        raise StoreFormatError(_miscounted(len(found), identity.num_stripes, places))
    # Where each was used without the other, what one of them cleared stays cleared.
    return replace(identity, first_segment=max(block.identity.first_segment for _, block in blocks))


def check_format(path: Path, block: Superblock) -> None:
    """
    Raises:
        StoreFormatError: the directory at ``path`` is of another format.
    """
    if block.format_version != FORMAT_VERSION:
        raise StoreFormatError(
            f"{path} has store format {block.format_version}, this version reads {FORMAT_VERSION}"
        )


def in_place(found: Sequence[F], num_stripes: int) -> list[F]:
    """By stripe: superblocks say where a directory belongs, the others fill the gaps in the order given."""
    placed = {item.superblock.stripe: item for item in found if item.superblock is not None}
    gaps = iter(sorted(set(range(num_stripes)) - set(placed)))
    placed.update((next(gaps), item) for item in found if item.superblock is None)
    for stripe, item in placed.items():
        item.volume.stripe = stripe
    return [placed[stripe] for stripe in range(num_stripes)]


def _miscounted(named: int, num_stripes: int, places: dict[int, Path]) -> str:
    known = [f"directory {stripe} is {places.get(stripe, 'not named')}" for stripe in range(num_stripes)]
    return (
        f"this store has {'1 directory' if num_stripes == 1 else f'{num_stripes} directories'}, but {named} "
        f"{'is' if named == 1 else 'are'} named: {', '.join(known)}; name exactly those of the store"
    )


def check_shared(path: Path) -> None:
    """Refuse a rank's directory ``path`` beside which servers with another number of ranks have stored something: no
    cap would count that.

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
