"""What a terminal can show, and output that cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from rich.console import Console

from sglang_hcache.core.errors import HCacheError


class OutputError(HCacheError):
    """A command's standard output cannot be written."""


def spinner_for(console: Console) -> str:
    """The name of a spinner that ``console`` can write: rich's own is made of braille."""
    return "dots" if console.encoding.startswith("utf") else "line"


def redraws(console: Console) -> bool:
    """Whether ``console`` can draw over what it shows: TERM=dumb, as in Emacs, cannot."""
    return console.is_terminal and not console.is_dumb_terminal


def never_fail_to_write(stream: TextIO) -> None:
    """What the encoding of ``stream`` does not have, such as the ² of R², is written as ?."""
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Standard output that raises :class:`OutputError`, at the latest at the end, where all of it is written.

    rich and typer end a command whose reader is gone with exit status 1, which some commands give a meaning.
    """
    plain = sys.stdout
    if plain is None:  # closed by our caller
        yield
        return
    sys.stdout = cast(TextIO, _CheckedOutput(plain))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError:
        _drop_rest(plain)
        raise
    finally:
        sys.stdout = plain


class _CheckedOutput:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _failures_named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _failures_named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write the output: {error.strerror or error}") from error


def _drop_rest(stream: TextIO) -> None:
    """Python writes what is left when it ends, and would complain once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
