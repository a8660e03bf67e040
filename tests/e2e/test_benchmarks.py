"""bench-smoke: the benchmarks with real servers, with ``--quick`` and less; the shape and the sanity of what they say.

No times are compared: only that they are there. Answers of all methods must be equal, or the benchmark fails itself.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.config import environment_with

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMES = ("mean", "p50", "p95", "p99")
LMCACHE = "not available here: LMCache needs a GPU"


def run(program: str, folder: Path, *options: str, named: str = "method") -> dict[str, Any]:
    """The results of one run, which must have gone well; they are on standard output and in the files.

    Args:
        named: the column that says what a row is of.
    """
    out, switches = folder / "out", folder.with_name(f"{folder.name}-switches")
    switches.mkdir()
    if (
        program != "overhead"
    ):  # whether a restore pays depends on the machine, and with small models it may not
        (switches / "always_restore").touch()
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), "--quick", "--json", "--out", str(out)]
    command += ["--dir", str(folder), *options]
    environment = environment_with({"HCACHE_TEST_SWITCHES": str(switches)})
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    data: dict[str, Any] = json.loads(result.stdout)
    assert json.loads((out / f"{program}.json").read_text()) == data
    with (out / f"{program}.csv").open(newline="") as file:
        assert [row[named] for row in csv.DictReader(file)] == [row[named] for row in data["rows"]]
    assert (out / f"{program}.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} == {"out"}
    check_header(data, program)
    return data


def check_header(data: dict[str, Any], program: str) -> None:
    assert data["benchmark"] == program
    assert (data["complete"], data["missing"]) == (True, [])
    assert data["machine"]["cores"] >= 1
    assert {"sglang", "sglang-hcache", "torch", "python"} <= data["versions"].keys()
    assert data["model"]["layers"] > 0


def check_row(row: dict[str, Any]) -> None:
    """What holds for every method, however fast the machine is."""
    ratios = [row[f"{source}_hit_ratio"] for source in ("device", "host", "disk")]
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert sum(ratios) <= 1
    assert sum(ratios) * row["prompt_tokens"] == pytest.approx(
        row["prompt_tokens"] - row["recomputed_tokens"]
    )
    assert row["recomputed_tokens"] >= row["requests"]  # the last token of a prompt at least
    assert row["unequal"] == 0
    assert row["largest_logprob_difference"] <= 1e-3
    assert all(row[f"ttft_{name}_s"] > 0 for name in TIMES)
    assert row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
    assert row["requests_per_s"] > 0


def test_zipf_replay(tmp_path: Path) -> None:
    options = (
        *("--alphas", "1", "--methods", "recompute,hidden,lmcache"),
        *("--rounds", "2", "--documents", "5", "--requests", "6", "--layers", "3", "--hidden", "128"),
    )
    data = run("zipf_replay", tmp_path, *options)
    recompute, hidden, lmcache = data["rows"]
    assert [row["method"] for row in data["rows"]] == ["recompute", "hidden", "lmcache"]
    assert {row["alpha"] for row in data["rows"]} == {1.0}
    assert (lmcache["requests"], lmcache["note"]) == (0, LMCACHE)
    for row in (recompute, hidden):
        check_row(row)
        assert row["requests"] == 2 * 6
        assert 0 < row["round_speedup_over_recompute_low"] <= row["round_speedup_over_recompute_high"]
        assert row["prompt_tokens"] == recompute["prompt_tokens"] > 300 * row["requests"]
    assert recompute["round_speedup_over_recompute"] == 1
    # Five documents of different lengths, and room for two of them with a question and an answer.
    workload = data["workload"]
    assert (workload["cut_documents"], workload["mean_whole_tokens"]) == (0, workload["mean_context_tokens"])
    assert 2 < data["sizes"]["pool_tokens"] / workload["mean_context_tokens"] < 3
    assert recompute["restored_tokens"] == 0
    assert hidden["restored_tokens"] > 0


def test_multiturn(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    options = (
        *("--model-path", str(tiny_model(layers=3, hidden=128, heads=2))),
        *("--rates", "20", "--methods", "recompute,kv,lmcache", "--conversations", "5"),
        *("--scale", "0.2", "--device-contexts", "1"),
    )
    data = run("multiturn", tmp_path, *options)
    recompute, kv, lmcache = data["rows"]
    assert [row["method"] for row in data["rows"]] == ["recompute", "kv", "lmcache"]
    assert {row["rate"] for row in data["rows"]} == {20.0}
    assert (lmcache["requests"], lmcache["note"]) == (0, LMCACHE)
    assert data["workload"]["conversations"] == 5
    assert data["rates_left_out"] == []
    for row in (recompute, kv):
        check_row(row)
        assert row["requests"] == data["workload"]["requests"] >= 10
        assert row["answer_tokens"] == recompute["answer_tokens"]
        assert all(row[f"tbt_{name}_s"] >= 0 for name in TIMES)
        assert row["tbt_p50_s"] <= row["tbt_p95_s"] <= row["tbt_p99_s"]
    # All conversations come at once and come back, and together they do not fit.
    total = data["workload"]["mean_context_tokens"] * 5
    assert data["sizes"]["pool_tokens"] < 0.8 * total
    assert recompute["restored_tokens"] == 0
    assert kv["restored_tokens"] > 0


def test_burst(tmp_path: Path) -> None:
    """More prompts than the KV pool holds."""
    options = ("--prompts", "6", "--methods", "recompute,kv,lmcache", "--device-contexts", "4")
    data = run("burst", tmp_path, *options)
    recompute, kv, lmcache = data["rows"]
    assert [row["method"] for row in data["rows"]] == ["recompute", "kv", "lmcache"]
    assert (lmcache["requests"], lmcache["note"]) == (0, LMCACHE)
    for row in (recompute, kv):
        check_row(row)
        assert (row["at_once"], row["requests"], len(row["rounds"])) == (6, 12, 2)
        assert row["device_hit_ratio"] == 0, "all had left the KV pool"
        assert 0 < row["round_speedup_over_recompute_low"] <= row["round_speedup_over_recompute_high"]
    assert recompute["restored_requests"] == 0
    assert kv["restored_requests"] > 0


def test_overhead(tmp_path: Path) -> None:
    sizes = (
        "--layers",
        "2",
        "--hidden",
        "128",
        "--prompt",
        "128",
        "--histories",
        "512",
        "--long-history",
        "512",
    )
    data = run("overhead", tmp_path, *sizes, "--rounds", "1", "--chunks", "2000", named="what")
    rows = {row["what"]: row for row in data["rows"]}
    compared = [row for row in rows.values() if "ratio" in row]
    assert len(compared) == 7
    for row in compared:
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    on_device = rows["512 tokens on the device, 64 are new: TTFT"]
    assert (on_device["device_tokens_off"], on_device["device_tokens_tier"]) == (492, 492)
    assert rows["decoding, 1 at once: TBT"]["saved_rows"] >= 64, "else it says nothing of saving"
    assert rows["512 tokens return, 64 are new: TTFT"]["restored_tokens"] in (0, 512)  # auto decides
    assert rows["look-up of 512 tokens among 2,000 chunks"]["tier"] > 0
    assert rows["memory"]["off"] > 0
    # A third of it is usual. What grows with a leak, or is there twice, takes more.
    assert rows["memory beyond --hcache-host-size"]["tier"] < 170_000_000
