"""Consoles and progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 30.0


def new_console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


class ProgressLines(Progress):
    """For a file or a pipe: a line when something begins, and one in a while that says how far it is.

    Args:
        every_s: least seconds between lines of the second kind.
    """

    def __init__(self, console: Console, every_s: float = _LINE_EVERY_S) -> None:
        super().__init__(console=console, disable=True)
        self._every_s = every_s
        self._told_at = 0.0

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        task = super().add_task(description, *args, **kwargs)
        self._tell(task)
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        if time.monotonic() - self._told_at >= self._every_s:
            self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        self._told_at = time.monotonic()
        task = next(task for task in self.tasks if task.id == task_id)
        of = "" if task.total is None else f": {task.completed:.0f} of {task.total:.0f}"
        after = f", {task.elapsed:.0f} s" if task.elapsed and task.completed else ""
        self.console.print(f"{task.description}{of}{after}", markup=False, highlight=False, soft_wrap=True)


def new_progress() -> Progress:
    """On standard error. Bars are drawn rarely, for what is measured shares the cores with them."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return ProgressLines(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)


@contextmanager
def while_doing(progress: Progress, text: str) -> Iterator[None]:
    """``text`` in ``progress``, where nobody knows how long it takes."""
    task = progress.add_task(text, total=None)
    try:
        yield
    finally:
        progress.remove_task(task)
