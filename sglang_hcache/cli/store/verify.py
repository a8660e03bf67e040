"""The progress of ``hcache store verify``: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from sglang_hcache.cli.terminal import progress, redraws
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.inspect.verify import Damage, Verification
from sglang_hcache.store.inspect.view import StoreView


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
    begin, checked = time.monotonic(), 0
    with nullcontext(lambda _: None) if quiet else _progress(verification.total_bytes) as show:
        for size in verification.steps():
            checked += size
            show(checked)
    return VerifyOutcome(
        runs=len(view.places) + len(view.torn) - verification.unavailable_runs,
        checked_bytes=checked,
        seconds=time.monotonic() - begin,
        damages=verification.damages,
        lost_runs=verification.lost_runs,
        unavailable_runs=verification.unavailable_runs,
    )


def speed(size: int, seconds: float) -> str:
    """``"512.0 MB/s"``."""
    return f"{format_bytes(size / max(seconds, 1e-3))}/s"


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Shows on standard output how many bytes are checked: with a bar and the time left in a terminal."""
    console = Console()
    if redraws(console):
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("verifying", total=total_bytes)
            yield lambda done: bar.update(task, completed=done)
        return
    begin, total = time.monotonic(), format_bytes(total_bytes)
    with progress(console) as show:
        yield lambda done: show(
            f"verifying: {format_bytes(done)} of {total} ({done / total_bytes:.0%}), "
            f"{speed(done, time.monotonic() - begin)}"
        )
