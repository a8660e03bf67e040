"""What ``ablations.py`` prints and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ablation.settings import OFF
from common.results import write_csv, write_json

SECTIONS = ("partition", "saving", "schedules")


def flat(section: str, row: Any) -> dict[str, Any]:
    """One row as JSON has it, lists for tuples as in the file."""
    data = asdict(row)
    if section == "partition":
        data["bytes_per_token"] = row.read_bytes / row.length
    if section == "saving":
        data["bytes_per_token"] = row.write_bytes / row.tokens
    if section == "schedules":
        data["ratio"] = row.ratio
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def show(data: dict[str, Any], console: Console) -> None:
    """The tables of the sections that were measured."""
    machine, model = data["machine"], data["model"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; {versions}; random model of {model['layers']} layers, "
        f"{model['hidden']} wide, {model['heads']} heads, {model['kv_heads']} KV heads; medians of {data['rounds']} "
        "rounds",
        highlight=False,
    )
    for section, tables in (("partition", _partition), ("saving", _saving), ("schedules", _schedules)):
        if section in data:
            console.print()
            for table in tables(data[section]):
                console.print(table)


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _partition(rows: Sequence[dict[str, Any]]) -> list[Table]:
    tables = []
    for tier in dict.fromkeys(row["tier"] for row in rows):
        table = _table(
            f"Partition by layers or by tokens, from {tier} (in brackets the least and the largest round)",
            ("tokens", "by", "H + KV", "closed form H"),
            (
                "ms",
                "x layers",
                "predicted",
                "products",
                "rows of a product",
                "reads",
                "KiB a read",
                "KiB a token",
            ),
        )
        for row in rows:
            if row["tier"] == tier:
                table.add_row(
                    f"{row['length']:,}", row["partition"], f"{row['hidden']:,} + {row['kv']:,}",
                    "" if row["closed_form"] is None else f"{row['closed_form']:,}",
                    f"{1e3 * row['seconds']:.1f}", _ratio(row, "min", "max"), f"{1e3 * row['predicted_s']:.1f}",
                    f"{1e3 * row['products_s']:.1f}",
                    f"{row['gemms']} x " + ", ".join(map(str, row["gemm_rows"])),
                    f"{row['reads']:,}", f"{row['read_bytes'] / row['reads'] / 1024:.0f}",
                    f"{row['bytes_per_token'] / 1024:.1f}",
                )  # fmt: skip
        tables.append(table)
    return tables


_INTERVAL = "(in brackets the 95 % confidence interval of the median)"


def _saving(rows: Sequence[dict[str, Any]]) -> list[Table]:
    tables = []
    for load, title, first, unit in (
        ("prefill", f"Saving during a prefill {_INTERVAL}", "tokens", "ms a prompt"),
        ("prefills", f"Prefills in a row, until all of them are saved {_INTERVAL}", "tokens", "ms a prompt"),
        ("decode", f"Saving while requests decode {_INTERVAL}", "requests", "TBT ms"),
    ):
        table = _table(
            title,
            (first, "saving"),
            (unit, "x off", "p99", "writes", "KiB a write", "KiB a token", "drain ms", "dropped"),
        )
        for row in rows:
            if row["load"] == load:
                size = row["write_bytes"] / row["writes"] / 1024 if row["writes"] else 0.0
                table.add_row(
                    f"{row['size']:,}", row["variant"], f"{1e3 * row['seconds']:.2f}", _ratio(row, "low", "high"),
                    f"{1e3 * row['p99_s']:.2f}", f"{row['writes']:,}", f"{size:.1f}",
                    f"{row['bytes_per_token'] / 1024:.1f}", f"{1e3 * row['drain_s']:.0f}", str(row["dropped"]),
                )  # fmt: skip
        if table.row_count:
            tables.append(table)
    return tables


def _schedules(rows: Sequence[dict[str, Any]]) -> list[Table]:
    table = _table(
        "Schedules and storage (the paper counts one byte a value; its 13B line does not fit its own schedule)",
        ("model", "from", "printed", "closed form", "search", "with fill", "stored"),
        ("KiB a token", "K and V", "x less", "printed KiB"),
    )
    for row in rows:
        one_byte = 2 if row["where"] == "paper" else 1
        table.add_row(
            row["model"], row["where"],
            *(split_text(row[name]) for name in ("printed", "closed_form", "searched", "searched_with_fill", "stored")),
            f"{row['bytes_per_token'] / one_byte / 1024:.0f}", f"{row['kv_bytes_per_token'] / one_byte / 1024:.0f}",
            f"{row['ratio']:.2f}", str(row["printed_kib"] or ""),
        )  # fmt: skip
    return [table]


def split_text(split: dict[str, int] | None) -> str:
    """Such as ``8 RE + 40 H``."""
    if split is None:
        return "none"
    parts = (("recompute", "RE"), ("hidden", "H"), ("kv", "KV"))
    return " + ".join(f"{split[name]} {short}" for name, short in parts if split[name])


def _ratio(row: dict[str, Any], low: str, high: str) -> str:
    return f"{row['ratio']:.3f} ({row[f'ratio_{low}']:.3f} to {row[f'ratio_{high}']:.3f})"


def write(folder: Path, data: dict[str, Any]) -> None:
    """``ablations.json``, and for each section a CSV file and a picture."""
    write_json(folder / "ablations.json", data)
    for section in SECTIONS:
        if section in data:
            write_csv(folder / f"ablations_{section}.csv", [_told(row) for row in data[section]])
            _draw(section, folder / f"ablations_{section}.png", data[section])


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """Splits as text, and all rows of products."""
    told = {name: split_text(value) if isinstance(value, dict) else value for name, value in row.items()}
    return told | ({"gemm_rows": " ".join(map(str, row["gemm_rows"]))} if "gemm_rows" in row else {})


def _draw(section: str, path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    panels = {"partition": _partition_panels, "saving": _saving_panels, "schedules": _schedule_panels}[
        section
    ](rows)
    figure = Figure(figsize=(max(5, WIDTH[section]) * len(panels), 4))
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, ylabel, groups, series) in zip(axes[0], panels, strict=True):
        _bars(axis, groups, series)
        axis.set(title=title, ylabel=ylabel)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


WIDTH = {"partition": 5, "saving": 9, "schedules": 9}
"""Of one panel, inches."""
Bars = dict[str, list[tuple[float, float, float]]]
"""Series -> (height, lowest, highest) of each group."""
Panel = tuple[str, str, list[str], Bars]
"""Title, what the bars are, groups, series."""


def _bars(axis: Any, groups: Sequence[str], series: Bars) -> None:
    """Medians, with lines from the least to the largest round, or over their confidence interval."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [value[0] for value in values]
        errors = [[h - low for h, low, _ in values], [high - h for h, _, high in values]]
        bars = axis.bar(at, heights, width, label=name, yerr=errors, capsize=2, error_kw={"linewidth": 0.8})
        axis.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7, padding=2)
    axis.set_xticks(range(len(groups)), groups)
    axis.margins(y=0.3)  # room for the legend
    if len(series) > 1:
        axis.legend(fontsize=8, loc="upper left", ncols=2)


def _partition_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    panels = []
    for tier in dict.fromkeys(row["tier"] for row in rows):
        of_tier = [row for row in rows if row["tier"] == tier]
        lengths = list(dict.fromkeys(row["length"] for row in of_tier))
        series: Bars = {}
        for row in of_tier:
            series.setdefault(row["partition"], []).append((row["ratio"], row["ratio_min"], row["ratio_max"]))
        panels.append((f"Partition by layers or tokens, {tier}", "time over that by layers",
                       [f"{length:,} tokens" for length in lengths], series))  # fmt: skip
    return panels


def _saving_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    series: Bars = {}
    for row in rows:
        if row["variant"] != OFF:
            series.setdefault(row["variant"], []).append((row["ratio"], row["ratio_low"], row["ratio_high"]))
    groups = [f"{row['load']},\n{row['size']:,} {'requests' if row['load'] == 'decode' else 'tokens'}"
              for row in rows if row["variant"] == OFF]  # fmt: skip
    return [("Passes that are saved", "time over that of passes that are not", groups, series)]


def _schedule_panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    groups = [f"{row['model']}\n{row['where']}\n{split_text(row['stored'])}" for row in rows]
    ratios = [(row["ratio"],) * 3 for row in rows]
    return [("Storage below K and V", "times less", groups, {"what is stored": ratios})]
