"""Bursts of requests, reduced to rows, and how those are told."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_hcache.cli.server.client import TokenSources

Import = Callable[[str], Any]


def burst(bench: Import, ttft_s: float, *, restored: int) -> Any:
    """Two requests, ``restored`` of which had something restored."""
    answers = [
        bench("serving.token_client").TokenAnswer(
            tokens=(1, 2),
            logprobs=(-1.0, -2.0),
            likely=({3: -4.0},) * 2,
            sources=TokenSources(device=0, host=64 * (number < restored), disk=0, recomputed=40),
            ttft_s=ttft_s + number,
            gaps_s=(0.1,),
            total_s=ttft_s + 1,
        )
        for number in range(2)
    ]
    return bench("serving.comparison").Measured(answers, ttft_s + 2)


def rows(bench: Import) -> list[dict[str, Any]]:
    bursts = {
        "recompute": [burst(bench, seconds - 0.5, restored=0) for seconds in (4.0, 6.0, 8.0)],
        "auto": [burst(bench, 2.0 - 0.5, restored=number) for number in range(3)],
    }
    made = bench("serving.bursts").rows_of_bursts(
        2, ("recompute", "auto", "lmcache"), bursts, {"lmcache": "why"}
    )
    assert isinstance(made, list)
    return made


def test_rounds_are_kept_and_their_ratios_have_an_interval(bench: Import) -> None:
    recompute, auto, lmcache = rows(bench)
    assert (auto["at_once"], auto["method"], auto["requests"]) == (2, "auto", 6)
    assert [each["restored_requests"] for each in auto["rounds"]] == [0, 1, 2]
    assert [each["ttft_mean_s"] for each in recompute["rounds"]] == [4.0, 6.0, 8.0]
    assert (recompute["last_s"], auto["last_s"]) == (7.5, 3.5)
    names = [f"round_speedup_over_recompute{name}" for name in ("", "_low", "_high")]
    assert [auto[name] for name in names] == [3.0, 2.0, 4.0]
    assert [recompute[name] for name in names] == [1.0, 1.0, 1.0]
    assert auto["round_speedup_over_kv"] is None
    assert auto["requests_per_s"] == pytest.approx(6 / 10.5)
    assert (lmcache["requests"], lmcache["note"], lmcache["rounds"], lmcache["last_s"]) == (
        0,
        "why",
        [],
        None,
    )


def test_they_are_shown_and_written(bench: Import, tmp_path: Path) -> None:
    data = {
        **bench("common.header").make_header("burst"),
        "model": {"name": "random", "architecture": "Llama", "layers": 2, "hidden": 64, "dtype": "float32"},
        "settings": {"history": 512, "new_tokens": 32, "answer_tokens": 8},
        "sizes": {"pool_tokens": 200},
        "rows": rows(bench),
    }
    report = bench("serving.burst_report")
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
    report.show(data, console)
    shown = console.export_text()
    for text in (
        "rounds [least - most]",
        "6.00 s [4.00 - 8.00]",
        "3.00 (2.00 to 4.00)",
        "0 - 2",
        "lmcache: why",
        "All 6 answers equal those of recompute",
    ):
        assert text in shown
    report.write(tmp_path, data)
    assert json.loads((tmp_path / "burst.json").read_text())["rows"] == data["rows"]
    with (tmp_path / "burst.csv").open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["recompute", "auto", "lmcache"]
    assert (tmp_path / "burst.png").read_bytes().startswith(b"\x89PNG")
