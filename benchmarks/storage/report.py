"""What ``store_io.py`` measured: tables, rows for files, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.results import write_csv, write_json
from sglang_hcache.core.units import format_bytes
from storage.loads import Sample

NO_FIO = "fio: not installed (apt install fio)"
FLOORS = {"read": 0.9, "randread": 0.9, "write": 0.8}
"""Share of fio's rate to reach at the same block size and depth; set before anything was measured."""
Record = Mapping[str, Any]
"""A row as JSON has it."""


@dataclass
class Row:
    """One way to do one load."""

    what: str
    """``engine`` or ``store``."""
    pattern: str
    variant: str
    """``fio``, ``posix``, ``nixl``, ``DiskStore`` ..."""
    block_bytes: int
    depth: int
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    """Why there are no samples."""

    def median(self, name: str) -> float:
        """Of one field of the samples."""
        return float(statistics.median(getattr(sample, name) for sample in self.samples))

    def ratio(self, fio: Row | None) -> float | None:
        """Of this rate to fio's in the same round, the median of all rounds; None if there is nothing to compare."""
        if fio is None or not fio.samples or not self.samples or fio is self:
            return None
        return statistics.median(
            mine.mb_per_s / other.mb_per_s for mine, other in zip(self.samples, fio.samples, strict=True)
        )

    def as_json(self, fio: Row | None) -> dict[str, Any]:
        """Medians, what they are of fio's, and the sample of each round."""
        return {
            "what": self.what,
            "pattern": self.pattern,
            "variant": self.variant,
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "rounds": len(self.samples),
            **{name: round(self.median(name), 4) for name in Sample.__dataclass_fields__ if self.samples},
            "ratio_to_fio": None if (ratio := self.ratio(fio)) is None else round(ratio, 4),
            "floor": FLOORS[self.pattern],
            "note": self.note,
            "samples": [asdict(sample) for sample in self.samples],
        }


def finished(rows: Sequence[Row]) -> list[Record]:
    """The rows of one load whose rounds are over, each beside fio's at its block size and depth."""
    fio = {(row.block_bytes, row.depth): row for row in rows if row.variant == "fio"}
    return [row.as_json(fio.get((row.block_bytes, row.depth))) for row in rows]


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON with the sample of each round, CSV with medians, and a picture."""
    write_json(folder / "store_io.json", data)
    write_csv(folder / "store_io.csv", data["rows"])
    _draw(data["rows"], folder / "store_io.png")


def show(data: dict[str, Any], console: Console) -> None:
    """The tables, and in one line whether the floors are reached."""
    rows, machine = data["rows"], data["machine"]
    console.print(
        f"{machine['cores']} CPUs, Linux {machine['kernel']}, {data['file_system']}; fio: {data['fio'] or NO_FIO}; "
        f"NIXL: {data['nixl']}; {data['plan']['rounds']} rounds, file of "
        f"{format_bytes(data['plan']['file_bytes'])}; red: below the floor",
        highlight=False,
    )
    for what, title in (("engine", "I/O engines"), ("store", "Disk store, digests verified")):
        if chosen := [row for row in rows if row["what"] == what]:
            console.print(_table_of(chosen, title))
    compared = [row for row in rows if row["ratio_to_fio"] is not None]
    missed = sum(map(_is_below_floor, rows))
    floors = ", ".join(f"{pattern} {100 * floor:.0f} %" for pattern, floor in FLOORS.items())
    console.print(f"{len(compared) - missed} of {len(compared)} rows reach their floor ({floors} of fio).")


def _is_below_floor(row: Record) -> bool:
    return row["ratio_to_fio"] is not None and row["ratio_to_fio"] < row["floor"]


def _table_of(rows: Sequence[Record], title: str) -> Table:
    """The rows of one kind, for a terminal."""
    table = Table(title=title, title_justify="left")
    for name in ("pattern", "block", "depth", "variant"):
        table.add_column(name)
    for name in ("MB/s", "of fio", "p50 ms", "p99 ms", "CPU %"):
        table.add_column(name, justify="right")
    loads: dict[tuple[str, int, int], list[Record]] = {}
    for row in rows:
        loads.setdefault((row["pattern"], row["block_bytes"], row["depth"]), []).append(row)
    for (pattern, block_bytes, depth), of_load in loads.items():
        table.add_section()
        for number, row in enumerate(of_load):
            begin = ("", "", "") if number else (pattern, _kib(block_bytes), str(depth))
            table.add_row(*begin, row["variant"], *_cells(row))
    return table


def _cells(row: Record) -> tuple[str, ...]:
    if not row["samples"]:
        return (row["note"], "", "", "", "")
    share = "" if row["ratio_to_fio"] is None else f"{100 * row['ratio_to_fio']:.0f} %"
    if _is_below_floor(row):
        share = f"[bold red]{share}[/]"
    return (
        f"{row['mb_per_s']:.0f}",
        share,
        f"{row['p50_ms']:.2f}",
        f"{row['p99_ms']:.2f}",
        f"{row['cpu_percent']:.0f}",
    )


def _kib(size: int) -> str:
    return f"{size // 2**20} MiB" if size % 2**20 == 0 else f"{size // 1024} KiB"


def _draw(rows: Sequence[Record], path: Path) -> None:
    """Share of fio's rate over the block size: a panel for each engine and pattern, a line for each depth."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["what"] == "engine" and row["variant"] != "fio" and row["samples"]]
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines, columns = max(len(variants), 1), max(len(patterns), 1)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for line, variant in enumerate(variants):
        for column, pattern in enumerate(patterns):
            chosen = [row for row in rows if row["variant"] == variant and row["pattern"] == pattern]
            _draw_panel(panels[line][column], f"{variant}, {pattern}", chosen)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_panel(panel: Any, title: str, rows: Sequence[Record]) -> None:
    with_ratio = any(row["ratio_to_fio"] is not None for row in rows)
    for depth in sorted({row["depth"] for row in rows}):
        line = [row for row in rows if row["depth"] == depth]
        heights = [(row["ratio_to_fio"] or 0.0) if with_ratio else row["mb_per_s"] for row in line]
        panel.plot([row["block_bytes"] / 1024 for row in line], heights, marker="o", label=f"depth {depth}")
    if with_ratio and rows:
        panel.axhline(FLOORS[rows[0]["pattern"]], color="black", linestyle="--", linewidth=1)
    panel.set_title(title)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("block size, KiB")
    panel.set_ylabel("rate, share of fio" if with_ratio else "MB/s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
