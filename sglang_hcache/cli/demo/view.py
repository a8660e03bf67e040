"""How the demo shows itself: as lines, in a terminal with what goes on now below them, or as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE, Timings
from sglang_hcache.cli.terminal import redraws, spinner_for
from sglang_hcache.core.units import format_bytes

_HEADING = "Prompt tokens by source; seconds to the first token, with the tier on and off"
_COLUMNS = (
    "turn",
    "chat",
    "prompt",
    "GPU",
    "host",
    "disk",
    "recomputed",
    "TTFT (s)",
    "off (s)",
    "ratio",
)
_WIDTHS = tuple(max(len(column), 5) for column in _COLUMNS)
"""With two spaces between them, all of a row fits into 80 columns."""


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


class PlainView:
    """One line a turn, for files and pipes."""

    def __init__(self) -> None:
        self._last = ""
        self._has_heading = False

    def status(self, text: str) -> None:
        stage = text.split(":")[0]  # without the seconds: one line a stage
        if stage and stage not in self._last:
            print(stage, flush=True)
            self._last = stage

    def turn(self, result: TurnResult) -> None:
        if not self._has_heading:
            self._has_heading = True
            self._print(_HEADING)
            self._print(_line(_COLUMNS), "bold")
        style = "" if result.is_returning else "dim"
        self._print(_line(_cells(result)), style if result.answer.is_equal else "bold red")

    def finish(self, report: DemoReport) -> None:
        print()
        print("\n".join(_summary_lines(report)), flush=True)

    def _print(self, line: str, style: str = "") -> None:
        print(line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveView(PlainView):
    """The same lines, and below them what goes on now."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._spinner = Spinner(spinner_for(console))
        self._status = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def _render(self) -> Group:
        if not self._status:
            return Group()
        self._spinner.update(text=self._status)
        return Group(self._spinner)

    def status(self, text: str) -> None:
        self._status = text

    def turn(self, result: TurnResult) -> None:
        super().turn(result)
        self._status = "Talking"

    def finish(self, report: DemoReport) -> None:
        self._status = ""
        self._live.stop()
        self._console.print()
        for line in _summary_lines(report):
            self._console.print(Text(line))

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style), soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status = ""
        self._live.stop()


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


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _cells(result: TurnResult) -> tuple[str, ...]:
    answer = result.answer
    sources = answer.tier.sources
    counts = (sources.prompt, sources.device, sources.host, sources.disk, sources.recomputed)
    return (
        str(result.turn),
        str(result.conversation),
        *(f"{count:,}" for count in counts),
        f"{answer.tier.ttft_s:.2f}",
        f"{answer.reference.ttft_s:.2f}",
        f"{answer.speedup:.2f}" if math.isfinite(answer.speedup) else "-",
    )
