"""The benchmark of the store's I/O runs, small, and reports what it measured."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_hcache.store.io.nixl import nixl_problem

ENGINES = ["posix"] if nixl_problem() else ["posix", "nixl"]


@pytest.fixture
def store_io(bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, with a small store."""
    module = bench("store_io")
    tiny = module.StoreLoad(2, runs_per_segment=2, num_chunks=4, num_layers=3, chunk_bytes=4096)
    make_plan = module.make_plan

    def with_tiny_store(**wanted: Any) -> Any:
        plan = make_plan(**wanted)
        return plan if plan.store is None else replace(plan, store=tiny)

    monkeypatch.setattr(module, "make_plan", with_tiny_store)
    return module


def run(store_io: Any, *arguments: str) -> str:
    result = CliRunner().invoke(store_io.app, arguments)
    if "O_DIRECT" in result.output:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    assert result.exit_code == 0, result.output
    return result.output


def small(tmp_path: Path) -> list[str]:
    sizes = ["--size", "1MiB", "--block", "64KiB", "--depth", "2", "--rounds", "2"]
    return ["--dir", str(tmp_path), "--quick", *sizes, "--out", str(tmp_path / "out")]


def report_of(tmp_path: Path) -> dict[str, Any]:
    report = json.loads((tmp_path / "out/store_io.json").read_text())
    assert isinstance(report, dict)
    return report


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_engines_are_compared_with_fio(store_io: Any, tmp_path: Path) -> None:
    output = run(store_io, *small(tmp_path))
    assert "rows reach their floor" in output
    report = report_of(tmp_path)
    rows = [(row["pattern"], row["variant"]) for row in report["rows"]]
    stores = [f"DiskStore, {name}" for name in ENGINES]
    assert rows == [
        *((pattern, variant) for pattern in ("read", "randread", "write") for variant in ("fio", *ENGINES)),
        *((pattern, variant) for pattern in ("write", "read") for variant in ("fio", *stores)),
    ]
    of_store = [row for row in report["rows"] if row["what"] == "store"]
    assert {(row["pattern"], row["block_bytes"], row["depth"]) for row in of_store} == {
        ("write", 16384, 8),
        ("read", 16384, 4),
    }
    assert all(len(row["samples"]) == 2 and row["mb_per_s"] > 0 for row in report["rows"])
    assert all((row["ratio_to_fio"] is None) == (row["variant"] == "fio") for row in report["rows"])
    with (tmp_path / "out/store_io.csv").open(newline="") as file:
        assert [(line["pattern"], line["variant"]) for line in csv.DictReader(file)] == rows
    assert (tmp_path / "out/store_io.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_fio_the_rows_say_so(store_io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    output = run(store_io, *small(tmp_path), "--no-store")
    assert "fio: not installed (apt install fio)" in output
    rows = report_of(tmp_path)["rows"]
    assert not [row for row in rows if row["what"] == "store"]
    assert {row["note"] for row in rows if row["variant"] == "fio"} == {
        "fio: not installed (apt install fio)"
    }
    assert all(row["ratio_to_fio"] is None for row in rows)
    assert all(len(row["samples"]) == 2 for row in rows if row["variant"] != "fio")


def test_what_was_measured_before_a_signal_is_written(
    bench: Callable[[str], Any], store_io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows only. How signals end a command: ``test_stopping.py``."""
    module = bench("storage.bench")
    run_engine, calls = module.run_engine, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        # Behind one to learn the rate and all of the first load, in the last round of the second load.
        if len(calls) == 1 + 3 * len(ENGINES) + 1:
            signal.raise_signal(signal.SIGTERM)
        return run_engine(*arguments)

    monkeypatch.setattr(module, "run_engine", interrupted)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    ended = CliRunner().invoke(store_io.app, [*small(tmp_path), "--no-store"])
    if "O_DIRECT" in ended.output:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    assert ended.exit_code == 143, ended.output
    report = report_of(tmp_path)
    assert report["missing"] == ["randread 64 KiB, depth 2", "write 64 KiB, depth 2"]
    measured = [(row["pattern"], len(row["samples"])) for row in report["rows"] if not row["note"]]
    assert measured == len(ENGINES) * [("read", 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
