"""What the superblocks of a store's directories say together, and where each directory belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.store.format.record import FORMAT_VERSION
from sglang_hcache.store.format.superblock import StoreIdentity, Superblock
from sglang_hcache.store.volumes.volume import Volume


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
    identity = max((block.identity for _, block in blocks), key=lambda item: item.epoch)
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
