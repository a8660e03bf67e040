"""How the demo shows itself: a live table in a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE, Timings
from sglang_hcache.cli.terminal import redraws, spinner_for
from sglang_hcache.core.units import format_bytes

_COLUMNS = (
    "turn",
    "conversation",
    "prompt tokens",
    "GPU cache",
    "host tier",
    "disk tier",
    "recomputed",
    "TTFT",
    "TTFT, tier off",
    "ratio",
)


class DemoView(Protocol):
    """Told what happens, in order. Use it as a context manager around the run."""

    def status(self, text: str) -> None:
        """What is going on now; empty when there is more to see than that."""

    def turn(self, result: TurnResult) -> None:
        """One more turn has its two answers."""

    def finish(self, report: DemoReport) -> None:
        """All turns are done."""

    def __enter__(self) -> DemoView: ...

    def __exit__(self, *_: object) -> None: ...


def choose_view(*, as_json: bool) -> DemoView:
    """The view for this process's standard output."""
    if as_json:
        return JsonView()
    console = Console()
    return LiveView(console) if redraws(console) else PlainView()


class LiveView:
    """A table that grows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._table = Table(title="SGLang with the hidden-state tier, and without it", title_justify="left")
        for column in _COLUMNS:
            self._table.add_column(column, justify="right")
        self._spinner = Spinner(spinner_for(console))
        self._status = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def _render(self) -> Group:
        parts: list[Table | Spinner] = [self._table] if self._table.row_count else []
        if self._status:
            self._spinner.update(text=self._status)
            parts.append(self._spinner)
        return Group(*parts)

    def status(self, text: str) -> None:
        self._status = text

    def turn(self, result: TurnResult) -> None:
        if self._table.row_count and result.conversation == 1:
            self._table.add_section()
        style = "" if result.is_returning else "dim"
        self._table.add_row(*_cells(result), style=style if result.answer.is_equal else "bold red")
        self._status = "Talking"

    def finish(self, report: DemoReport) -> None:
        self._status = ""
        self._live.stop()  # what is printed while it is live appears above the table
        self._console.print()
        for line in _summary_lines(report):
            self._console.print(Text(line))

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status = ""
        self._live.stop()


class PlainView:
    """One line a turn, for files and pipes."""

    _WIDTHS = tuple(max(len(column), 8) for column in _COLUMNS)

    def __init__(self) -> None:
        self._last = ""
        self._has_header = False

    def status(self, text: str) -> None:
        stage = text.split(":")[0]  # without the seconds: one line a stage
        if stage and stage not in self._last:
            print(stage, flush=True)
            self._last = stage

    def turn(self, result: TurnResult) -> None:
        if not self._has_header:
            self._has_header = True
            self._print(_COLUMNS)
        self._print(_cells(result))

    def finish(self, report: DemoReport) -> None:
        print()
        print("\n".join(_summary_lines(report)), flush=True)

    def _print(self, cells: tuple[str, ...]) -> None:
        print(
            "  ".join(cell.rjust(width) for cell, width in zip(cells, self._WIDTHS, strict=True)), flush=True
        )

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class JsonView(PlainView):
    """One JSON object on standard output at the end; what is going on goes to standard error."""

    def status(self, text: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            super().status(text)

    def turn(self, result: TurnResult) -> None:
        pass

    def finish(self, report: DemoReport) -> None:
        print(json.dumps(report.as_json(), indent=2), flush=True)


def _summary_lines(report: DemoReport) -> list[str]:
    """The end of a run, for people."""
    lines = []
    if report.first is not None:
        from_before = any(turn.answer.tier.sources.restored for turn in report.turns if not turn.is_returning)
        why = "restored from an earlier run" if from_before else "nothing to restore yet"
        lines.append(f"First turns ({why}): {_timing(report.first)}")
    if report.returning is not None:
        lines.append(
            f"Returning turns: {_timing(report.returning)}: {report.returning.median_speedup:.2f} times faster "
            f"in the median, {report.returning.total_speedup:.2f} times in total"
        )
    summary = report.summary
    lines.append(
        f"Restored tokens: {summary.host_tokens:,} from host memory, {summary.disk_tokens:,} from disk; "
        f"the KV pool holds {report.pool_tokens:,}"
    )
    places = ", ".join(str(directory) for directory in report.dirs)
    lines.append(
        f"On disk: {format_bytes(report.disk_bytes)} with {report.disk_chunks} chunks in {places}"
        f" ({'kept' if report.kept else 'removed now'})"
    )
    if report.failure is None:
        lines.append(
            f"All {summary.requests} answers equalled the recomputed ones: same tokens, largest difference of "
            f"logprobs {summary.largest_difference:.1e} (allowed {LOGPROB_TOLERANCE:g})"
        )
    lines.append(f"Took {report.wall_s:.0f} s")
    return lines


def _timing(timings: Timings) -> str:
    return (
        f"TTFT {timings.tier_median_s:.2f} s with the tier, {timings.reference_median_s:.2f} s without it "
        f"(medians of {timings.requests})"
    )


def _cells(result: TurnResult) -> tuple[str, ...]:
    answer = result.answer
    sources = answer.tier.sources
    counts = (sources.prompt, sources.device, sources.host, sources.disk, sources.recomputed)
    return (
        str(result.turn),
        str(result.conversation),
        *(f"{count:,}" for count in counts),
        f"{answer.tier.ttft_s:.2f} s",
        f"{answer.reference.ttft_s:.2f} s",
        f"{answer.speedup:.2f}" if math.isfinite(answer.speedup) else "-",
    )
