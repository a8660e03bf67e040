"""What ``overhead.py`` prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from common.results import write_csv, write_json
from sglang_hcache.core.units import format_bytes


def show(data: dict[str, Any], console: Console) -> None:
    """One row for each thing that was compared."""
    table = Table(
        title="A server with the tier beside one without (medians, and the 95 % confidence interval of the ratio)",
        title_justify="left",
    )
    for name in ("", "off", "tier", "tier / off", "95 %", "restored"):
        table.add_column(name, justify="left" if not name else "right")
    for row in data["rows"]:
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}" if "ratio" in row else ""
        if "low" in row:
            interval = f"{_text(row['low'], row['unit'])} to {_text(row['high'], row['unit'])}"
        table.add_row(
            row["what"],
            _text(row["off"], row["unit"]),
            "not measured" if "not_measured" in row else _text(row["tier"], row["unit"]),
            f"{row['ratio']:.3f}" if "ratio" in row else "",
            interval,
            _restored(row),
        )
    console.print(table)
    for row in data["rows"]:
        if "not_measured" in row:
            console.print(f"{row['what']}: not measured: {row['not_measured']}")
        if "compared" in row:
            console.print(
                f"{row['what']}: {row['differ']} of {row['compared']} answers differ ({row['ties']} ties), logprobs by "
                f"{row['largest_logprob_difference']:.1e} at most",
                highlight=False,
            )


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and a picture."""
    write_json(folder / "overhead.json", data)
    write_csv(folder / "overhead.csv", data["rows"])
    _draw(folder / "overhead.png", [row for row in data["rows"] if "ratio" in row])


def _draw(path: Path, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    axis = figure.add_subplot()
    places = range(len(rows), 0, -1)
    ratios = [row["ratio"] for row in rows]
    low = [row["ratio"] - row["ratio_low"] for row in rows]
    high = [row["ratio_high"] - row["ratio"] for row in rows]
    axis.barh(list(places), ratios, xerr=(low, high), color="#1f8a4c", height=0.6)
    axis.set_yticks(list(places), [row["what"] for row in rows])
    axis.axvline(1.0, color="#777777")
    axis.set_xlabel("time with the tier / time without it (1: no difference)")
    figure.savefig(path, dpi=120)


def _restored(row: dict[str, Any]) -> str:
    """Tokens, and from where if that is known."""
    parts = [f"{row[f'{tier}_tokens']:,.0f} {tier}" for tier in ("host", "disk") if row.get(f"{tier}_tokens")]
    return " + ".join(parts) or (f"{row['restored_tokens']:,.0f}" if "restored_tokens" in row else "")


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "no token"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "x":
        return f"{value:.2f} x"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"
