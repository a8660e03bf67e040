"""Consoles and progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def new_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def new_progress() -> Progress:
    """Bars on standard error, drawn rarely: what is measured shares the cores with them. Nothing in a file or pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    )


@contextmanager
def while_doing(progress: Progress, text: str) -> Iterator[None]:
    """``text`` in ``progress``, where nobody knows how long it takes."""
    task = progress.add_task(text, total=None)
    try:
        yield
    finally:
        progress.remove_task(task)
