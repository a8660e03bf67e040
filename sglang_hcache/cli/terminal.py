"""What a terminal can show."""

from __future__ import annotations

import contextlib
import io
from typing import TextIO

from rich.console import Console


def spinner_for(console: Console) -> str:
    """The name of a spinner that ``console`` can write: rich's own is made of braille."""
    return "dots" if console.encoding.startswith("utf") else "line"


def redraws(console: Console) -> bool:
    """Whether ``console`` can draw over what it shows: TERM=dumb, as in Emacs, cannot."""
    return console.is_terminal and not console.is_dumb_terminal


def never_fail_to_write(stream: TextIO) -> None:
    """What the encoding of ``stream`` does not have, such as the ² of R², is written as ?.

    UTF-8 lacks only the bytes of paths that are not UTF-8: those are written as escapes.
    """
    if isinstance(stream, io.TextIOWrapper):
        is_utf = stream.encoding.lower().startswith("utf")
        with contextlib.suppress(OSError):  # its file was replaced by one that cannot seek
            stream.reconfigure(errors="backslashreplace" if is_utf else "replace")
