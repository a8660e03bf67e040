"""How far a benchmark is, where no bar can be drawn."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console


def test_a_line_when_something_begins_and_one_in_a_while(bench: Callable[[str], Any]) -> None:
    lines = bench("common.terminal").ProgressLines
    out = io.StringIO()
    with lines(Console(file=out), every_s=3600) as progress:
        progress.add_task("loading", total=None)
        task = progress.add_task("disk:100MB", total=3)
        progress.advance(task)
    assert out.getvalue().splitlines() == ["loading", "disk:100MB: 0 of 3"]
    out = io.StringIO()
    with lines(Console(file=out), every_s=0) as progress:
        task = progress.add_task("[kv]", total=2)
        progress.advance(task)
        progress.update(task, description="auto")
        progress.advance(task)
    first, second, third = out.getvalue().splitlines()
    assert (first, second.split(",")[0], third.split(",")[0]) == (
        "[kv]: 0 of 2",
        "[kv]: 1 of 2",
        "auto: 2 of 2",
    )


def test_it_goes_to_standard_error(bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with bench("common.terminal").new_progress() as progress:
        progress.add_task("loading", total=None)
    assert capsys.readouterr() == ("", "loading\n")
