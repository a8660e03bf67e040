"""Paths as people write them."""

from __future__ import annotations

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
