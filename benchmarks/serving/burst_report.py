"""What ``burst.py`` prints and writes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.results import write_csv, write_json
from serving.comparison import BASELINES
from serving.report import (
    COLOURS,
    draw_speedups,
    draw_times,
    measured_methods,
    new_figure,
    print_equality,
    print_notes,
    ratio_of_rounds,
    save_figure,
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
    table = Table(
        title="Bursts: medians of rounds \\[least - most], ratios of mean TTFT with the 95 % interval of the median",
        title_justify="left",
    )
    table.add_column("at once", justify="right")
    table.add_column("method")
    for name in ("TTFT mean", "last answer", "restored", *(f"x {name}" for name in BASELINES), "unequal"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if row["at_once"] != last:
            table.add_section()
        first = "" if row["at_once"] == last else str(row["at_once"])
        last = row["at_once"]
        table.add_row(first, row["method"], *(_cells(row) if row["requests"] else ["-"]))
    console.print(table, highlight=False)
    print_notes(console, rows)
    print_equality(console, rows)


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and, where anything was measured, a picture."""
    write_json(folder / "burst.json", data)
    rows = [{name: value for name, value in row.items() if name != "rounds"} for row in data["rows"]]
    write_csv(folder / "burst.csv", rows)
    if measured_methods(rows):
        draw(data, folder / "burst.png")


def draw(data: dict[str, Any], path: Path) -> None:
    """TTFT, its speed-up and the last answer over the number of prompts."""
    rows, settings = data["rows"], data["settings"]
    figure, (times, speedups, ends) = new_figure(3)
    draw_times(times, rows, "at_once", "ttft")
    draw_speedups(speedups, rows, "at_once")
    _draw_ends(ends, rows)
    for axes in (times, speedups, ends):
        axes.set_xlabel("prompts at once")
    caption = f"{settings['history']:,} tokens that return, {settings['new_tokens']} new ones"
    save_figure(figure, path, caption, data)


def _draw_ends(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Each round's last answer, and a line through the medians."""
    for method in measured_methods(rows):
        line = [row for row in rows if row["method"] == method]
        at = [row["at_once"] for row in line]
        axes.plot(at, [row["last_s"] for row in line], "-", color=COLOURS[method])
        for row in line:
            ends = [each["last_s"] for each in row["rounds"]]
            axes.plot([row["at_once"]] * len(ends), ends, "o", color=COLOURS[method], markersize=4, alpha=0.6)
    axes.set_title("Last answer: rounds, and their median", fontsize=10)
    axes.set_ylabel("s")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row["at_once"] for row in rows}))
    axes.grid(alpha=0.25)


def _cells(row: dict[str, Any]) -> list[str]:
    of_rounds = {name: [each[name] for each in row["rounds"]] for name in row["rounds"][0]}
    restored = of_rounds["restored_requests"]
    least, most = min(restored), max(restored)
    return [
        _spread(of_rounds["ttft_mean_s"]),
        _spread(of_rounds["last_s"]),
        f"{least} - {most}" if least < most else str(most),
        *(ratio_of_rounds(row, name) for name in BASELINES),
        f"[bold red]{row['unequal']}[/]" if row["unequal"] else "0",
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s \\[{min(values):.2f} - {max(values):.2f}]"
