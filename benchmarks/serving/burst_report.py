"""What ``burst.py`` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from serving.report import (
    COLOURS,
    REQUESTS,
    TTFT_MEAN,
    Row,
    draw_panels,
    draw_times,
    measured_methods,
    print_equality,
    print_table,
    save_figure,
    speedup_panels,
    write_results,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def show(data: dict[str, Any], console: Console) -> None:
    """One row for each method at each number of prompts."""
    settings, rows = data["settings"], data["rows"]
    console.print(
        f"Prompts of {settings['history']:,} tokens that return and {settings['new_tokens']} new ones, answers of "
        f"{settings['answer_tokens']}; KV pool of {data['sizes']['pool_tokens']:,} tokens",
        highlight=False,
    )
    restored = ("restored", lambda row: str(row["restored_requests"]))
    columns = (REQUESTS, TTFT_MEAN, ("last answer", _last_answer), restored)
    print_table(console, "at_once", "Bursts; last answer: least to most of the rounds", rows, columns)
    print_equality(console, rows)


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and, where anything was measured, a picture."""
    write_results(folder / "burst", data, draw)


def draw(data: dict[str, Any], path: Path) -> None:
    """TTFT, its speed-up and the last answer over the number of prompts."""
    rows, settings = data["rows"], data["settings"]
    panels = [partial(draw_times, what="ttft"), *speedup_panels(rows), _draw_ends]
    figure = draw_panels(rows, "at_once", "prompts at once", panels)
    caption = f"{settings['history']:,} tokens that return, {settings['new_tokens']} new ones"
    save_figure(figure, path, caption, data)


def _draw_ends(axes: Axes, rows: Sequence[Row], key: str) -> None:
    """Each round's last answer."""
    for method in measured_methods(rows):
        ends = [(row[key], end) for row in rows if row["method"] == method for end in _ends(row)]
        axes.plot(*zip(*ends, strict=True), "o", color=COLOURS[method], markersize=4, alpha=0.6)
    axes.set_title("Last answer of each round", fontsize=10)
    axes.set_ylabel("s")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row[key] for row in rows}))
    axes.grid(alpha=0.25)


def _last_answer(row: Row) -> str:
    return f"{min(_ends(row)):.2f} - {max(_ends(row)):.2f} s"


def _ends(row: Row) -> list[float]:
    return [each["busy_s"] for each in row["rounds"] or ()]
