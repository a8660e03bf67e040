"""What a terminal can show."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console

_LINE_EVERY_S = 30.0


def redraws(console: Console) -> bool:
    """Whether ``console`` can draw over what it shows: TERM=dumb, as in Emacs, cannot."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows what it is given beside a spinner; in a file or a pipe as lines: a stage at once, and how far it is, behind
    a colon, once in a while.

    In a terminal what is printed meanwhile comes out at ``console``, wherever standard output goes.
    """
    if redraws(console):
        spinner = "dots" if console.encoding.startswith("utf") else "line"  # rich's own is made of braille
        with console.status("", spinner=spinner) as status:
            yield status.update
        return
    told_at = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told_at
        if ":" not in text or time.monotonic() - told_at >= _LINE_EVERY_S:
            told_at = time.monotonic()
            print(text, file=console.file, flush=True)

    yield tell


def never_fail_to_write(stream: TextIO) -> None:
    """What the encoding of ``stream`` does not have, such as the ² of R², is written as ?.

    UTF-8 lacks only the bytes of paths that are not UTF-8: those are written as escapes.
    """
    if isinstance(stream, io.TextIOWrapper):
        is_utf = stream.encoding.lower().startswith("utf")
        with contextlib.suppress(OSError):  # its file was replaced by one that cannot seek
            stream.reconfigure(errors="backslashreplace" if is_utf else "replace")
