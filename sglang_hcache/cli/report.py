"""What commands print, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_hcache.core.layout import Method
from sglang_hcache.core.metrics import RESTORE_PHASES

METHOD_NAMES = {Method.HIDDEN: "hidden states", Method.KV: "K and V", Method.RECOMPUTE: "recomputed"}
_PHASE_NAMES = {
    "queue": "waiting to begin",
    "read": "reading",
    "project": "writing K and V",
    "recompute": "recomputing layers",
}
_PIPE_WIDTH = 160
"""Columns where nobody's window limits them."""


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
    """An empty table with a heading; columns in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def counted(number: int, what: str) -> str:
    """``"1 run"``, ``"1,234 runs"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def restore_times(measures: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Names of what restores spent time on, and seconds of each divided by all that ended well; none before the first.

    Args:
        measures: of ``/server_info``.
    """
    whole = measures.get("restore.seconds")
    if whole is None:
        return []
    spent = {phase: measures.get(f"restore.{phase}_seconds") for phase in RESTORE_PHASES}
    return [
        (_PHASE_NAMES[phase], measure["sum"] / whole["count"])
        for phase, measure in spent.items()
        if measure is not None and measure["sum"] > 0
    ]


def seconds_text(seconds: float) -> str:
    """``"85 ms"``, ``"1.42 s"``."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
