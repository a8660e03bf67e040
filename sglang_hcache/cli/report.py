"""Texts and tables of ``hcache store``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sglang_hcache.store.inspect.view import StoreView

_PIPE_WIDTH = 160
"""Columns where nobody's window limits them."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Report:
    """One answer in both forms."""

    data: Mapping[str, Any]
    """Can be written as JSON."""
    parts: Sequence[RenderableType]
    """Shown one below the other."""

    def print(self) -> None:
        """To standard output."""
        print_report(self.parts)


def print_report(parts: Iterable[RenderableType]) -> None:
    """To standard output, one below the other; texts are not wrapped, and where there is no window tables are wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def new_table(columns: Sequence[str], right: set[str]) -> Table:
    """An empty table with a heading; columns in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def first_of(items: Iterable[_T], limit: int) -> Iterable[_T]:
    """At most ``limit`` of ``items``; all if it is 0."""
    return itertools.islice(items, limit or None)


def counted(number: int, what: str) -> str:
    """``"1 run"``, ``"1,234 runs"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def num_directories(number: int) -> str:
    """``"1 directory"``, ``"2 directories"``."""
    return "1 directory" if number == 1 else f"{number} directories"


def iso_time(at: float | None) -> str | None:
    """For programs: a time in UTC. ``at``: seconds since the epoch."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def ago(at: float | None) -> str:
    """For people: how long ago ``at`` was, seconds since the epoch."""
    if at is None:
        return "?"
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def index_note(view: StoreView) -> list[Text]:
    """Where the answer comes from, if not from the index."""
    if not view.index_problem:
        return []
    return [Text(f"{view.index_problem}; this is what the segments' headers say", "yellow")]
