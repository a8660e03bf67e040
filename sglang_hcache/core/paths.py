"""Paths as people write them."""

from __future__ import annotations

import errno
from pathlib import Path


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
