"""Paths that are given to commands."""

from __future__ import annotations

from pathlib import Path

import typer

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.paths import whole_path


def named_path(text: str) -> Path:
    """The path ``text``, for typer to parse an argument with.

    Raises:
        typer.BadParameter: it is empty. To ``Path`` that is the current folder, which nobody meant.
    """
    if not text:
        raise typer.BadParameter("the name is empty; is a variable of your shell not set?")
    return Path(text)


def given_path(name: str, path: str | Path) -> Path:
    """``path`` from / on, its ``~`` replaced.

    Args:
        name: of the argument that it was given for, for the message.

    Raises:
        ConfigError: it begins with a home directory that nobody has.
    """
    try:
        return whole_path(path)
    except ValueError as error:
        raise ConfigError(f"{name}: {str(path)!r} is not allowed; {error}") from None
