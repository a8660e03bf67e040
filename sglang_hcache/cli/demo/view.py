"""How the demo shows itself: as a line a turn, or as JSON at the end."""

from __future__ import annotations

import json
import math

from rich.console import Console
from rich.text import Text

from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE, Timings
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


class TextView:
    """A line a turn, and a summary."""

    def __init__(self, console: Console) -> None:
        self.console = console
        """Where progress belongs, too."""
        self._has_heading = False

    def turn(self, result: TurnResult) -> None:
        """One more turn has its two answers."""
        if not self._has_heading:
            self._has_heading = True
            self._print(_HEADING)
            self._print(_line(_COLUMNS), "bold")
        style = "" if result.is_returning else "dim"
        self._print(_line(_cells(result)), style if result.answer.is_equal else "bold red")

    def finish(self, report: DemoReport) -> None:
        """All turns are done."""
        for line in ("", *_summary_lines(report)):
            self.console.print(Text(line), soft_wrap=not self.console.is_terminal)

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style), soft_wrap=True)


class JsonView(TextView):
    """One object at the end."""

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
    lines.append(
        f"On disk: {format_bytes(report.disk_bytes)} with {report.disk_chunks} chunks in {report.tier_folder}"
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
