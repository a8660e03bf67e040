"""Output that cannot be written: no traceback, and no exit status that says something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HCACHE = [sys.executable, "-c", "from sglang_hcache.cli.main import main; main()"]
COMMANDS = [
    ["--version"],
    ["flags"],
    ["flags", "--json"],
    ["serve", "--help"],
    ["plan", "llama2-7b", "--io-gbps", "1", "--tflops", "1"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@each_command
def test_a_full_disk_is_told_in_a_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*HCACHE, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr == "hcache: error: [Errno 28] No space left on device\n"
    assert done.returncode == 2


@each_command
def test_a_reader_that_is_gone_is_no_news(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*HCACHE, *command], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode in (1, 2)


def test_output_that_is_closed_is_not_missed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *HCACHE, "flags"], stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", [["flags"], ["serve", "--help"]], ids=" ".join)
def test_where_nobodys_window_limits_them_tables_are_wide(command: list[str]) -> None:
    done = subprocess.run([*HCACHE, *command], stdout=subprocess.PIPE, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) > 120
