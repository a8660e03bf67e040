"""What commands print, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sglang_hcache.core.layout import Method
from sglang_hcache.core.metrics import RESTORE_PHASES, WAITING

METHOD_NAMES = {Method.HIDDEN: "hidden states", Method.KV: "K and V", Method.RECOMPUTE: "recomputed"}
_PIPE_WIDTH = 160
"""Columns where nobody's window limits them."""
_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Report:
    """One answer in both forms."""

    data: Mapping[str, Any]
    """Can be written as JSON."""
    parts: Sequence[RenderableType]
    """Shown one below the other."""

    def show(self, *, as_json: bool) -> None:
        """Print one of them."""
        if as_json:
            print(json.dumps(self.data, indent=2))
        else:
            print_report(self.parts)


def print_report(parts: Iterable[RenderableType]) -> None:
    """To standard output, one below the other; texts are not wrapped, and where there is no window tables are wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def new_table(columns: Sequence[str], right: set[str]) -> Table:
    """An empty table with a heading; columns in ``right`` hold numbers. In narrow windows all else folds."""
    table = _FoldingTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


class _FoldingTable(Table):
    """Where it is wider than the window, words of headings stand below each other, and columns closer together."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = Measurement.get(console, options.update(max_width=_ANY_WIDTH), self).maximum
        narrow = copy(self)
        if whole > options.max_width:
            narrow.padding = (0, 1, 0, 0)
            narrow.columns = [
                replace(column, header=str(column.header).replace(" ", "\n")) for column in self.columns
            ]
        yield from Table.__rich_console__(narrow, console, options)


def counted(number: int, what: str) -> str:
    """``"1 run"``, ``"1,234 runs"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


Measures: TypeAlias = Mapping[str, Mapping[str, float]]
"""Those of ``/server_info``: ``count`` and ``sum`` of each since the server started."""


def restore_times(measures: Measures, before: Measures | None = None) -> list[tuple[str, float]]:
    """Parts of restores, and seconds of each divided by all that ended well since ``before``; none if none did."""
    restores, _ = _gained("restore.read_seconds", measures, before)
    spent = {phase: _gained(f"restore.{phase}_seconds", measures, before)[1] for phase in RESTORE_PHASES}
    return [(phase, seconds / restores) for phase, seconds in spent.items() if seconds > 0 and restores > 0]


def waiting_times(measures: Measures, before: Measures | None = None) -> list[tuple[str, float]]:
    """What requests waited for that went on since ``before``, and for how many seconds on average."""
    waited = {phase: _gained(f"wait.{phase}_seconds", measures, before) for phase in WAITING}
    return [(phase, seconds / count) for phase, (count, seconds) in waited.items() if count > 0]


def _gained(name: str, measures: Measures, before: Measures | None) -> tuple[float, float]:
    """How often it was measured since ``before``, or since the start, and the sum."""
    now, then = measures.get(name, {}), (before or {}).get(name, {})
    return now.get("count", 0) - then.get("count", 0), now.get("sum", 0.0) - then.get("sum", 0.0)


def seconds_text(seconds: float) -> str:
    """``"85 ms"``, ``"1.42 s"``."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
