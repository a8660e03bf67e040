"""The ablations run, small, with a real model, and what they say is sane. No times: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ablations.py"
TIERS = ("host", "disk:500MB")
LENGTHS = (256, 1024)
LAYERS, HIDDEN = 4, 128
ROW_BYTES = 4 * HIDDEN
"""Hidden states of one token and layer, float32. K and V take twice as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ablations")


@pytest.fixture(scope="module")
def data(folder: Path) -> dict[str, Any]:
    command = [
        *(
            sys.executable,
            str(BENCHMARK),
            "--quick",
            "--json",
            "--dir",
            str(folder),
            "--out",
            str(folder / "out"),
        ),
        *("--layers", str(LAYERS), "--hidden", str(HIDDEN), "--heads", "2", "--kv-layers", "1"),
        *("--dtype", "float32"),
        *("--tiers", ",".join(TIERS), "--lengths", ",".join(map(str, LENGTHS)), "--rounds", "2"),
        *("--batches", "1,3", "--steps", "8", "--prefill", "128"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_header_and_files(data: dict[str, Any], folder: Path) -> None:
    assert data["versions"].keys() >= {"sglang", "sglang-hcache", "torch"}
    assert data["machine"]["cores"] >= 1
    assert data["complete"], data["missing"]
    assert data["model"]["layers"] == LAYERS
    out = folder / "out"
    assert json.loads((out / "ablations.json").read_text()) == data
    for section in ("partition", "saving", "schedules"):
        lines = (out / f"ablations_{section}.csv").read_text().splitlines()
        assert len(lines) == 1 + len(data[section])
        assert (out / f"ablations_{section}.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in folder.iterdir()] == ["out"]  # the scratch files are gone


def test_partitions_restore_what_the_model_computed(data: dict[str, Any]) -> None:
    rows = data["partition"]
    partitions = ("layers", "tokens", "tokens, rounded")
    assert {(row["tier"], row["length"], row["partition"]) for row in rows} == {
        (tier, length, partition) for tier in TIERS for length in LENGTHS for partition in partitions
    }
    for row in rows:
        assert row["error"] < 0.05
        assert row["seconds"] > 0
        assert row["predicted_s"] > 0
        assert len(row["times"]) == 2
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]


def test_partitions_read_the_same_bytes_in_other_pieces(data: dict[str, Any]) -> None:
    for tier in TIERS:
        for length in LENGTHS:
            of = {r["partition"]: r for r in data["partition"] if (r["tier"], r["length"]) == (tier, length)}
            exact = (LAYERS + 1) * ROW_BYTES  # one layer of K and V, or a quarter of the tokens
            for row in of.values():
                assert exact <= row["bytes_per_token"] < 1.25 * exact  # on disk, headers too
            assert of["tokens"]["reads"] > of["layers"]["reads"]
            assert of["tokens"]["gemms"] == LAYERS
            assert of["layers"]["gemms"] == LAYERS - 1
            assert of["layers"]["gemm_rows"] == [length]
            assert of["tokens"]["gemm_rows"] == [length * 3 // 4]


def test_what_is_saved_is_the_same_however_it_is_saved(data: dict[str, Any]) -> None:
    rows = data["saving"]
    loads = {("prefill", 128), ("prefills", 128), ("decode", 1), ("decode", 3)}
    assert {(row["load"], row["size"]) for row in rows} == loads
    for load, size in loads:
        of = {row["variant"]: row for row in rows if (row["load"], row["size"]) == (load, size)}
        assert of.keys() == {"off", "two-stage", "direct, page cache", "direct"}
        saved = [row for name, row in of.items() if name != "off"]
        assert len({row["digest"] for row in saved}) == 1
        assert all(row["digest"] for row in saved)
        assert not any(row["dropped"] for row in of.values())
        assert of["off"]["write_bytes"] == 0
        assert of["off"]["ratio"] == of["off"]["ratio_low"] == of["off"]["ratio_high"] == 1
        for row in saved:
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        for name in ("direct, page cache", "direct"):
            assert of[name]["bytes_per_token"] == LAYERS * ROW_BYTES
        assert of["two-stage"]["writes"] > 0
        if load == "decode":  # a prompt's chunks may be written one by one too, if the disk keeps up
            assert of["two-stage"]["writes"] < of["direct"]["writes"]


def test_schedules_are_those_of_the_paper(data: dict[str, Any]) -> None:
    rows = {(row["model"], row["where"]): row for row in data["schedules"]}
    ratios = {model: round(row["ratio"], 2) for (model, where), row in rows.items() if where == "paper"}
    assert ratios == {"llama2-7b": 1.94, "llama2-13b": 1.82, "opt-30b": 2.40}
    here = [row for (_, where), row in rows.items() if where != "paper"]
    assert {row["where"] for row in here} == {"host", "disk"}
    for row in here:
        assert row["kv_bytes_per_token"] == LAYERS * 2 * ROW_BYTES
        assert 1 <= row["ratio"] <= 2
        assert sum(row["stored"].values()) == LAYERS


def test_what_was_measured_before_a_signal_is_written(tmp_path: Path) -> None:
    """The second tier's disk is so slow that the signal comes before its rows."""
    sizes = ("--layers", "4", "--hidden", "128", "--heads", "2", "--lengths", "256", "--rounds", "30")
    command = [sys.executable, str(BENCHMARK), "partition", "--quick", "--tiers", "host,disk:5MB", *sizes]
    process = subprocess.Popen(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: process.poll() is not None or any(tmp_path.glob("*/partition-1")), 300)
    finally:
        process.terminate()
    _, words = process.communicate()
    assert process.returncode == 143, words
    found = json.loads((tmp_path / "out" / "ablations.json").read_text())
    assert (found["complete"], found["missing"]) == (False, ["partition: disk:5MB, 256 tokens"])
    assert [(row["tier"], len(row["times"])) for row in found["partition"]] == 3 * [("host", 30)]
    assert "partition: host, 256 tokens" in words
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
