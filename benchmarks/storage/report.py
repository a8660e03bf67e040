"""What ``store_io.py`` measured: tables, rows for files, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_hcache.core.units import format_bytes
from storage.loads import Sample

NO_FIO = "fio: not installed (apt install fio)"
FLOORS = {"read": 0.9, "randread": 0.9, "write": 0.8}
"""Share of fio's rate to reach at the same block size and depth; set before anything was measured."""


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
        """Of this rate to fio's in the same round, the median of all rounds."""
        if fio is None or not fio.samples or not self.samples or fio is self:
            return None
        return statistics.median(
            mine.mb_per_s / other.mb_per_s for mine, other in zip(self.samples, fio.samples, strict=True)
        )


@dataclass
class Report:
    header: dict[str, Any]
    """Machine, versions and options."""
    rows: list[Row] = field(default_factory=list)

    def fio_of(self, row: Row) -> Row | None:
        """The row of fio that ``row`` is compared with."""
        key = (row.what, row.pattern, row.block_bytes, row.depth)
        for other in self.rows:
            found = (other.what, other.pattern, other.block_bytes, other.depth)
            if other.variant == "fio" and found == key:
                return other
        return None

    def ratio(self, row: Row) -> float | None:
        """To fio's rate; None if there is nothing to compare with."""
        return row.ratio(self.fio_of(row))

    def below_floor(self) -> list[Row]:
        """Rows that do not reach their floor."""
        return [
            row for row in self.rows if (ratio := self.ratio(row)) is not None and ratio < FLOORS[row.pattern]
        ]

    def flat(self) -> list[dict[str, Any]]:
        """One record a row, medians only."""
        return [
            {
                "what": row.what,
                "pattern": row.pattern,
                "variant": row.variant,
                "block_bytes": row.block_bytes,
                "depth": row.depth,
                "rounds": len(row.samples),
                **{name: round(row.median(name), 4) for name in Sample.__dataclass_fields__ if row.samples},
                "ratio_to_fio": None if (ratio := self.ratio(row)) is None else round(ratio, 4),
                "floor": FLOORS[row.pattern],
                "note": row.note,
            }
            for row in self.rows
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, with the sample of each round."""
        rows = [
            {**flat, "samples": [asdict(sample) for sample in row.samples]}
            for flat, row in zip(self.flat(), self.rows, strict=True)
        ]
        return {**self.header, "floors": FLOORS, "rows": rows}


def show(report: Report, console: Console) -> None:
    """The tables, and in one line whether the floors are reached."""
    header = report.header
    console.print(
        f"{header['cpus']} CPUs, Linux {header['kernel']}, {header['file_system']}; fio: {header['fio'] or NO_FIO}; "
        f"NIXL: {header['nixl']}; {header['plan']['rounds']} rounds, file of "
        f"{format_bytes(header['plan']['file_bytes'])}; red: below the floor",
        highlight=False,
    )
    for what, title in (("engine", "I/O engines"), ("store", "Disk store, digests verified")):
        if any(row.what == what for row in report.rows):
            console.print(_table_of(report, what, title))
    compared = [row for row in report.rows if report.ratio(row) is not None]
    missed = len(report.below_floor())
    floors = ", ".join(f"{pattern} {100 * floor:.0f} %" for pattern, floor in FLOORS.items())
    if disturbed := header["disturbed_rounds"]:
        console.print(f"Other processes used the CPUs during {disturbed} rounds: do not trust the ratios.")
    console.print(f"{len(compared) - missed} of {len(compared)} rows reach their floor ({floors} of fio).")


def _table_of(report: Report, what: str, title: str) -> Table:
    """The rows of one kind, for a terminal."""
    table = Table(title=title, title_justify="left")
    for name in ("pattern", "block", "depth", "variant"):
        table.add_column(name)
    for name in ("MB/s", "of fio", "p50 ms", "p99 ms", "CPU %"):
        table.add_column(name, justify="right")
    loads: dict[tuple[str, int, int], list[Row]] = {}
    for row in report.rows:
        if row.what == what:
            loads.setdefault((row.pattern, row.block_bytes, row.depth), []).append(row)
    for (pattern, block_bytes, depth), rows in loads.items():
        table.add_section()
        for number, row in enumerate(rows):
            begin = ("", "", "") if number else (pattern, _kib(block_bytes), str(depth))
            table.add_row(*begin, row.variant, *_cells(report, row))
    return table


def _cells(report: Report, row: Row) -> tuple[str, ...]:
    if not row.samples:
        return (row.note, "", "", "", "")
    ratio = report.ratio(row)
    share = "" if ratio is None else f"{100 * ratio:.0f} %"
    if ratio is not None and ratio < FLOORS[row.pattern]:
        share = f"[bold red]{share}[/]"
    return (
        f"{row.median('mb_per_s'):.0f}",
        share,
        f"{row.median('p50_ms'):.2f}",
        f"{row.median('p99_ms'):.2f}",
        f"{row.median('cpu_percent'):.0f}",
    )


def _kib(size: int) -> str:
    return f"{size // 2**20} MiB" if size % 2**20 == 0 else f"{size // 1024} KiB"


def draw(report: Report, path: Path) -> None:
    """Share of fio's rate over the block size: a panel for each engine and pattern, a line for each depth."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.what == "engine" and row.variant != "fio" and row.samples]
    patterns = list(dict.fromkeys(row.pattern for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    lines, columns = max(len(variants), 1), max(len(patterns), 1)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for line, variant in enumerate(variants):
        for column, pattern in enumerate(patterns):
            chosen = [row for row in rows if row.variant == variant and row.pattern == pattern]
            _draw_panel(report, panels[line][column], f"{variant}, {pattern}", chosen)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_panel(report: Report, panel: Any, title: str, rows: Sequence[Row]) -> None:
    with_ratio = any(report.ratio(row) is not None for row in rows)
    for depth in sorted({row.depth for row in rows}):
        line = [row for row in rows if row.depth == depth]
        heights = [(report.ratio(row) or 0.0) if with_ratio else row.median("mb_per_s") for row in line]
        panel.plot([row.block_bytes / 1024 for row in line], heights, marker="o", label=f"depth {depth}")
    if with_ratio and rows:
        panel.axhline(FLOORS[rows[0].pattern], color="black", linestyle="--", linewidth=1)
    panel.set_title(title)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("block size, KiB")
    panel.set_ylabel("rate, share of fio" if with_ratio else "MB/s")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
