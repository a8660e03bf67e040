"""Tables in windows that are narrower than they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_hcache.cli import report
from sglang_hcache.cli.main import app
from sglang_hcache.cli.report import new_table
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

in_each_window = pytest.mark.parametrize("width", [60, 80])


@pytest.fixture
def store(tmp_path: Path) -> str:
    config = small_config(tmp_path)
    with closing(DiskStore.open(config, Counters())) as opened:
        write_keys(opened, make_keys(0, 4), (4096,))
    return str(config.dirs[0])


def rows(monkeypatch: pytest.MonkeyPatch, width: int, *command: str) -> list[list[str]]:
    """Words of each line. What is not in a table is not wrapped, and may be longer."""
    monkeypatch.setattr(report, "_PIPE_WIDTH", width)
    shown = CliRunner().invoke(app, list(command)).stdout
    assert "…" not in shown
    return [line.split() for line in shown.splitlines()]


@in_each_window
def test_a_plan(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    found = rows(monkeypatch, width, "plan", "llama2-7b", "--io-gbps", "26", "--tflops", "197")
    assert ["method", "hidden", "V", "recomputed", "token", "ms", "plan"] in found
    assert [line[1:7] for line in found if line[0:1] == ["hcache"]] == [
        ["30", "2", "0", "278,528", "43.9", "1.00"]
    ]


@in_each_window
def test_a_store(monkeypatch: pytest.MonkeyPatch, width: int, store: str) -> None:
    stat = rows(monkeypatch, width, "store", "stat", store)
    assert any("healthy" in line and line[-3:] == ["1", "0", "0"] for line in stat)
    assert any(line[-1:] == ["ok"] for line in rows(monkeypatch, width, "store", "ls", store))


@in_each_window
def test_the_settings(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    assert rows(monkeypatch, width, "flags")


def test_a_number_that_does_not_fit_is_seen_to_be_cut() -> None:
    """278,52 would be another number."""
    table = new_table(["what", "bytes a token"], right={"bytes a token"})
    table.add_row("all of them", "278,528")
    for width in range(4, 20):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        shown = capture.get()
        assert "278,528" in shown or "…" in shown, (width, shown)


def test_a_table_that_fits_is_not_folded() -> None:
    table = new_table(["what", "bytes a token"], right={"bytes a token"})
    table.add_row("all", "278,528")
    for width, lines in ((20, 2), (16, 4)):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        assert len(capture.get().splitlines()) == lines
