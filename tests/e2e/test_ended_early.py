"""Benchmarks that get a signal when their first rows are measured: what they write, and that nothing else is left."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_hcache.cli.server.launch import prepare_launch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL_MODEL = ("--layers", "4", "--hidden", "128", "--heads", "2", "--quick")


def end_early(
    program: str, folder: Path, *options: str, after: str, number: signal.Signals
) -> tuple[dict[str, Any], str]:
    """The results and the last words of a run that gets the signal ``number`` when its progress bar says ``after``."""
    terminal, stderr = pty.openpty()  # progress is shown in a terminal only
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), *options]
    _, environment = prepare_launch([])  # else the ablations start anew with it
    process = subprocess.Popen(
        [*command, "--dir", str(folder), "--out", str(folder / "out")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        # A test run in the background of a script inherits "ignore", and so would the benchmark.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(stderr)
    children: set[psutil.Process] = set()
    text, is_sent = "", False
    while new := read(terminal):
        text += new
        if not is_sent:
            children |= set(psutil.Process(process.pid).children(recursive=True))
            if re.search(after, text, re.DOTALL):
                process.send_signal(number)
                is_sent = True
    os.close(terminal)
    if "O_DIRECT" in text:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    assert is_sent, text[-4000:]
    assert process.wait() == 128 + number, text[-4000:]
    assert not any(child.is_running() for child in children)
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(folder) in " ".join(command)], "also no orphan"
    assert [path.name for path in folder.iterdir()] == ["out"]
    return json.loads((folder / "out" / f"{program}.json").read_text()), text[text.rindex(f"{program}: ") :]


def read(terminal: int) -> str:
    """What is new; nothing when the other side is closed."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


def check_files(out: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with (out / f"{name}.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows) > 0
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_store_io(tmp_path: Path) -> None:
    options = ("--size", "8MiB", "--rounds", "10", "--quick")
    data, words = end_early("store_io", tmp_path, *options, after=r" [1-9]\d*/20", number=signal.SIGINT)
    assert data["benchmark"] == "store_io"
    assert data["complete"] is False
    assert len(data["missing"]) < 20
    assert {"the store writes", "the store reads"} <= set(data["missing"])
    assert all(row["rounds"] == 10 for row in data["rows"] if row["samples"]), "whole rows only"
    check_files(tmp_path / "out", "store_io", data["rows"])
    assert "ended by Ctrl-C" in words
    assert "read 64 KiB, depth 4" in words
    assert "not measured" in words


def test_partition(tmp_path: Path) -> None:
    """The disk is so slow that the signal comes before its rows."""
    sizes = ("--lengths", "256", "--tiers", "host,disk:5MB", "--rounds", "30")
    data, words = end_early(
        "ablations",
        tmp_path,
        *("partition", *SMALL_MODEL, *sizes),
        after=r"(3[1-9]|[45]\d)/60",
        number=signal.SIGTERM,
    )
    assert (data["complete"], data["missing"]) == (False, ["partition: disk:5MB, 256 tokens"])
    assert {row["tier"] for row in data["partition"]} == {"host"}
    assert all(len(row["times"]) == 30 for row in data["partition"])
    check_files(tmp_path / "out", "ablations_partition", data["partition"])
    assert "partition: host, 256 tokens" in words
