"""Directories of the ranks of one server: each rank has a store of its own, below a directory that they share."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_hcache.core.errors import StoreFormatError
from sglang_hcache.core.paths import ranks_named_by
from sglang_hcache.store.volumes.directory import has_superblock


def check_shared(path: Path) -> None:
    """Whether ``path``, if it is a rank's, has nothing beside it that would count for no cap.

    Raises:
        StoreFormatError: a store of servers with another number of ranks.
        OSError: the directory above cannot be asked.
    """
    num_ranks, shared = ranks_named_by(path.name), path.parent
    if num_ranks is None or not shared.exists():
        return
    others = 1 if has_superblock(shared) else ranks_in(shared, but=num_ranks)
    if others is not None:
        raise StoreFormatError(
            f"{shared} holds what a server with --tp-size {others} stored, which one with --tp-size {num_ranks} cannot "
            "use; give --hcache-dirs another directory, or remove what is in this one"
        )


def ranks_in(shared: Path, but: int | None = None) -> int | None:
    """A number of ranks, but for this one, of which one has a store below ``shared``; None: none. Raises OSError."""
    for name in sorted(os.listdir(shared)):
        number = ranks_named_by(name)
        if number not in (None, but) and has_superblock(shared / name):
            return number
    return None
