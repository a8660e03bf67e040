"""How a comparison of methods is shown: tables, and the parts of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.gathered import count_unequal
from common.precision import precision
from common.results import write_csv, write_json
from serving.comparison import BASELINES, SOURCES, reference_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""Its name, and what it says of a row."""
Panel = Callable[["Axes", Sequence[Row], str], None]
"""Draws rows over a key."""
COLOURS = {
    "recompute": "#777777",
    "kv": "#d1711f",
    "hidden": "#2f6fb5",
    "hybrid": "#8a5fb0",
    "auto": "#1f8a4c",
    "hicache": "#b03a5b",
    "hicache-file": "#7a2840",
    "lmcache": "#3a3a3a",
}
_SHADES = {"device": 1.0, "host": 0.6, "disk": 0.3}


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:,.0f} ms" if value >= 0.1 else f"{1e3 * value:.1f} ms"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _time(name: str, field: str) -> Column:
    return name, lambda row: _seconds(row[field])


def _hits(source: str) -> Column:
    return source, lambda row: f"{row[f'{source}_hit_ratio']:.0%}"


REQUESTS: Column = ("requests", lambda row: str(row["requests"]))
TTFT_MEAN = _time("TTFT mean", "ttft_mean_s")
COLUMNS = (
    REQUESTS,
    *map(_hits, SOURCES),
    ("req/s", lambda row: _number(row["requests_per_s"])),
    *(TTFT_MEAN, *(_time(name, f"ttft_{name}_s") for name in ("p50", "p95", "p99"))),
)
TBT = (_time("TBT mean", "tbt_mean_s"), _time("p99", "tbt_p99_s"))


def measured_methods(rows: Sequence[Row]) -> list[str]:
    """Those with measurements, in order."""
    return list(dict.fromkeys(row["method"] for row in rows if row["requests"]))


def print_table(
    console: Console, key: str, title: str, rows: Sequence[Row], columns: Sequence[Column]
) -> None:
    """All rows; a section for each value of ``key``, and behind ``columns`` speed-ups and unequal answers."""
    table = Table(title=title, title_justify="left")
    table.add_column(key, justify="right")
    table.add_column("method")
    for name in (*(name for name, _ in columns), *(f"x {name}" for name in BASELINES), "unequal"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if row[key] != last:
            table.add_section()
        first = f"{row[key]:g}" if row[key] != last else ""
        last = row[key]
        if not row["requests"]:
            table.add_row(first, row["method"], "-")
            continue
        table.add_row(
            first,
            row["method"],
            *(text(row) for _, text in columns),
            *(ratio_of_rounds(row, baseline) for baseline in BASELINES),
            f"[bold red]{row['unequal']}[/]" if row["unequal"] else "0",
        )
    console.print(table)
    print_notes(console, rows)


def ratio_of_rounds(row: Row, baseline: str) -> str:
    """Of mean TTFT; of several rounds the median, with the ends of its 95 % interval."""
    name = f"round_speedup_over_{baseline}"
    median, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    return _number(median) if low == high else f"{median:.2f} ({low:.2f} to {high:.2f})"


def print_notes(console: Console, rows: Sequence[Row]) -> None:
    """Why methods were not measured."""
    for method, note in {row["method"]: row["note"] for row in rows if row["note"]}.items():
        console.print(f"{method}: {note}", highlight=False)


def print_equality(console: Console, rows: Sequence[Row]) -> None:
    """In one line whether all methods gave the same answers."""
    methods = measured_methods(rows)
    compared = sum(row["compared"] for row in rows if row["requests"])
    unequal = count_unequal(rows)
    if unequal:
        console.print(f"[bold red]{unequal} of {compared} answers differ from those of the reference.[/]")
        return
    if len(methods) < 2:
        console.print("Answers were compared with nobody's: fewer than two methods were measured.")
        return
    largest = max((row.get("largest_logprob_difference") or 0.0 for row in rows), default=0.0)
    ties = sum(row["ties"] for row in rows if row["requests"])
    console.print(
        f"All {compared} answers equal those of {reference_of(methods)}: same tokens ({ties} only up to a tie), "
        f"largest difference of logprobs {largest:.1e} (allowed {precision().logprob_tolerance:g}).",
        highlight=False,
    )


def write_results(path: Path, data: Mapping[str, Any], draw: Callable[[Any, Path], None]) -> None:
    """JSON, CSV and, where anything was measured, a picture; ``path`` is without its ending."""
    write_json(path.with_suffix(".json"), data)
    write_csv(path.with_suffix(".csv"), data["rows"])
    if measured_methods(data["rows"]):
        draw(data, path.with_suffix(".png"))


# -- pictures ------------------------------------------------------------------------------------------


def draw_panels(rows: Sequence[Row], key: str, label: str, panels: Sequence[Panel]) -> Figure:
    """A figure with ``panels`` beside each other; ``label`` says what ``key`` is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.9 * len(panels), 4.3), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        panel(axes, rows, key)
        axes.set_xlabel(label)
    return figure


def save_figure(figure: Figure, path: Path, caption: str, data: Mapping[str, Any]) -> None:
    """As PNG, with a line above all panels and the methods' colours below them.

    Args:
        caption: what was asked; servers, model and machine are put behind it.
    """
    from matplotlib.patches import Patch

    methods, model = measured_methods(data["rows"]), data["model"]
    figure.suptitle(
        f"{caption}, KV pool of {data['sizes']['pool_tokens']:,} tokens; {model['name']} {model['architecture']}, "
        f"{model['layers']} layers x {model['hidden']}, {model['dtype']}; {data['machine']['cores']} cores",
        fontsize=10,
    )
    handles = [Patch(color=COLOURS[method], label=method) for method in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(methods), fontsize="small")
    figure.savefig(path, dpi=130)


def draw_times(axes: Axes, rows: Sequence[Row], key: str, *, what: str, tail: str = "p95") -> None:
    """Mean (solid) and a percentile (dashed) of each method over ``key``, milliseconds."""
    for method in measured_methods(rows):
        line = [row for row in rows if row["method"] == method and row[f"{what}_mean_s"] is not None]
        line.sort(key=lambda row: row[key])
        at = [row[key] for row in line]
        for name, style in (("mean", "o-"), (tail, "^--")):
            heights = [1e3 * row[f"{what}_{name}_s"] for row in line]
            axes.plot(
                at, heights, style, color=COLOURS[method],
                alpha=1.0 if name == "mean" else 0.55, markersize=5,
            )  # fmt: skip
    axes.set_title(f"{what.upper()}: mean (solid), {tail} (dashed)", fontsize=10)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    _finish(axes, rows, key)


def speedup_panels(rows: Sequence[Row]) -> list[Panel]:
    """How many times smaller the mean TTFT is than the first baseline's; none without a baseline."""
    measured = measured_methods(rows)
    return [partial(_draw_speedups, baseline=name) for name in BASELINES if name in measured][:1]


def _draw_speedups(axes: Axes, rows: Sequence[Row], key: str, *, baseline: str) -> None:
    """The median of the rounds, and its interval."""
    for method in measured_methods(rows):
        name = f"round_speedup_over_{baseline}"
        line = [row for row in rows if row["method"] == method and row[name] is not None]
        line.sort(key=lambda row: row[key])
        at, heights = [row[key] for row in line], [row[name] for row in line]
        axes.plot(at, heights, "o-", color=COLOURS[method], label=method)
        lows, highs = ([row[f"{name}_{end}"] for row in line] for end in ("low", "high"))
        axes.vlines(at, lows, highs, color=COLOURS[method], alpha=0.55)
        if method != baseline:
            for row, height in zip(line, heights, strict=True):
                axes.annotate(
                    f"{height:.2f}", (row[key], height), xytext=(0, 6), textcoords="offset points",
                    ha="center", fontsize=7, color=COLOURS[method],
                )  # fmt: skip
    axes.set_title(f"Speed-up of mean TTFT over {baseline}", fontsize=10)
    axes.set_ylabel("times")
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    _finish(axes, rows, key)


def draw_hits(axes: Axes, rows: Sequence[Row], key: str) -> None:
    """Where prompt tokens came from: stacked bars, one a method, side by side for each value of ``key``."""
    methods = measured_methods(rows)
    values = sorted({row[key] for row in rows})
    width = 0.8 / max(len(methods), 1)
    for row in rows:
        if not row["requests"]:
            continue
        number = methods.index(row["method"])
        at, bottom = values.index(row[key]) + (number - (len(methods) - 1) / 2) * width, 0.0
        for source in SOURCES:
            height = row[f"{source}_hit_ratio"]
            axes.bar(
                at, height, 0.92 * width, bottom, color=COLOURS[row["method"]], alpha=_SHADES[source],
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            bottom += height
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color="black", alpha=_SHADES[source], label=source) for source in SOURCES],
        fontsize="x-small", ncols=3, loc="upper center",
    )  # fmt: skip
    axes.set_title("Prompt tokens by source; one bar a method", fontsize=10)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_ylabel("of all prompt tokens")
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])


def _finish(axes: Axes, rows: Sequence[Row], key: str) -> None:
    values = sorted({row[key] for row in rows})
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.grid(alpha=0.25)
