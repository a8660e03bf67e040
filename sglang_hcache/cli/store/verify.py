"""The progress of ``hcache store verify``: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.inspect.verify import Damage, Verification
from sglang_hcache.store.inspect.view import StoreView

_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """What one pass found."""

    runs: int
    """Checked."""
    checked_bytes: int
    seconds: float
    damages: list[Damage]
    lost_runs: int
    """Not checked, because nothing is left that names them."""
    unavailable_runs: int
    """Not checked, because a directory is out."""


def run_verification(view: StoreView, *, quiet: bool) -> VerifyOutcome:
    """Verify the store, showing progress on standard output unless ``quiet``."""
    verification = Verification(view)
    steps = verification.steps()
    console = Console()
    begin = time.monotonic()
    if not quiet:
        steps = _bar(console, steps, verification) if console.is_terminal else _lines(steps, verification)
    sizes = list(steps)
    return VerifyOutcome(
        runs=len(view.places) + len(view.torn) - verification.unavailable_runs,
        checked_bytes=sum(sizes),
        seconds=time.monotonic() - begin,
        damages=verification.damages,
        lost_runs=verification.lost_runs,
        unavailable_runs=verification.unavailable_runs,
    )


def speed(size: int, seconds: float) -> str:
    """``"512.0 MB/s"``."""
    return f"{format_bytes(size / max(seconds, 1e-3))}/s"


def _bar(console: Console, steps: Iterator[int], verification: Verification) -> Iterator[int]:
    columns = (
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=verification.total_bytes)
        for size in steps:
            progress.advance(task, size)
            yield size


def _lines(steps: Iterator[int], verification: Verification) -> Iterator[int]:
    begin = shown = time.monotonic()
    done = 0
    for size in steps:
        yield size
        done += size
        now = time.monotonic()
        if now - shown >= _LINE_EVERY_S:
            shown = now
            print(
                f"checked {format_bytes(done)} of {format_bytes(verification.total_bytes)} "
                f"({done / verification.total_bytes:.0%}), {speed(done, now - begin)}",
                flush=True,
            )
