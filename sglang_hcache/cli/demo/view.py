"""How the demo shows itself: a line a turn, and a spinner where there is a terminal; or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE, Timings
from sglang_hcache.cli.terminal import redraws, spinner_for
from sglang_hcache.core.units import format_bytes

_TITLE = "Tokens of each prompt by where they came from, and the time to the first token with and without the tier:"
_COLUMNS = {
    "turn": 4,
    "chat": 4,
    "prompt": 6,
    "device": 6,
    "host": 6,
    "disk": 6,
    "recomputed": 10,
    "TTFT": 7,
    "tier off": 8,
    "ratio": 5,
}
"""Heading -> characters: a line fits into a window of 80."""


class DemoView:
    """Told what happens, in order. Use it as a context manager around the run.

    As JSON it prints one object at the end, and what is going on to standard error.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = console = Console(stderr=as_json, highlight=False)
        self._spinner = console.status("", spinner=spinner_for(console)) if redraws(console) else None
        self._last_stage = ""
        self._has_header = False

    def status(self, text: str) -> None:
        """What is going on now."""
        stage = text.split(":")[0]  # without the seconds: one line a stage
        if self._spinner is not None:
            self._spinner.update(text)
            self._spinner.start()
        elif stage not in self._last_stage:
            self._console.print(stage)
            self._last_stage = stage

    def turn(self, result: TurnResult) -> None:
        """One more turn has its two answers."""
        if self._as_json:
            return
        if not self._has_header:
            self._has_header = True
            self._print(Text(_TITLE))
            self._print(_row(_COLUMNS, "bold"))
        style = "" if result.is_returning else "dim"
        self._print(_row(_cells(result), style if result.answer.is_equal else "bold red"))

    def finish(self, report: DemoReport) -> None:
        """All turns are done."""
        self._stop()
        if self._as_json:
            print(json.dumps(report.as_json(), indent=2), flush=True)
            return
        self._print(Text())
        for line in _summary_lines(report):
            self._print(Text(line))

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _stop(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def __enter__(self) -> DemoView:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _row(cells: Iterable[str], style: str) -> Text:
    padded = (cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True))
    return Text("  ".join(padded), style)


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
