"""Output that cannot be written: no traceback, and no exit status that says something else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

HCACHE = [sys.executable, "-c", "from sglang_hcache.cli.main import main; main()"]
COMMANDS = [
    ["--version"],
    ["flags"],
    ["flags", "--json"],
    ["metrics"],
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


def without_reader(command: list[str]) -> tuple[int, bytes]:
    """Exit status and standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*HCACHE, *command], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@each_command
def test_a_reader_that_is_gone_is_no_news(command: list[str]) -> None:
    assert without_reader(command) == (2, b"")


@pytest.mark.parametrize(
    "command",
    [["stat"], ["ls"], ["fsck"], ["verify"], ["verify", "--json"], ["verify", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_is_gone_is_no_damage(command: list[str], tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with closing(DiskStore.open(config, Counters())) as store:
        write_keys(store, make_keys(0, 4), (4096,))
    assert without_reader(["store", *command, *map(str, config.dirs)]) == (2, b"")


def test_output_that_is_closed_is_not_missed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *HCACHE, "flags"], stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", [["flags"], ["serve", "--help"]], ids=" ".join)
def test_where_nobodys_window_limits_them_tables_are_wide(command: list[str]) -> None:
    done = subprocess.run([*HCACHE, *command], stdout=subprocess.PIPE, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) > 120
