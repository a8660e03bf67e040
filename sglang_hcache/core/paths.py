"""Paths as people write them."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

_RANK_DIR = re.compile(r"rank-\d+-of-(\d+)")


def rank_dir(path: Path, rank: int, num_ranks: int) -> Path:
    """Where the store of one rank is, below the directory that several share; of one alone that directory itself."""
    return path if num_ranks == 1 else path / f"rank-{rank}-of-{num_ranks}"


def ranks_named_by(name: str) -> int | None:
    """How many ranks there are where one of them has a directory of that name; None: it is no such name."""
    found = _RANK_DIR.fullmatch(name)
    return None if found is None else int(found[1])


def whole_path(path: str | Path) -> Path:
    """``path`` from / on, its ``~`` replaced.

    Raises:
        ValueError: it begins with a home directory that nobody has.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ValueError("nobody knows this home directory; write the path from / on") from None


def real_place(path: Path) -> Path:
    """Where ``path`` leads, whether there is something or not.

    Raises:
        ValueError: nowhere: a link on the way leads back to itself.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # resolve() says so up to Python 3.12 only
            raise ValueError(f"a symbolic link of {path} leads back to itself") from None
    return path.resolve()


def check_distinct(places: Sequence[Path]) -> None:
    """
    Raises:
        ValueError: two of them are the same directory, or one is inside of another.
    """
    if len(set(places)) != len(places):
        raise ValueError("the same directory is named twice")
    if any(one in other.parents for one in places for other in places):
        raise ValueError("one directory is inside of another")
