"""``hcache store`` while it reads headers: a signal ends it as Ctrl-C does, and it releases what it holds."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import NAMESPACE_ID, make_keys, small_config, write_keys

COMMAND = """
import signal, sys, time
from sglang_hcache.cli import main
from sglang_hcache.store import census

def read_for_ever(numbers, volumes):
    print("reading", flush=True)
    while True:
        time.sleep(0.01)

for number in (signal.SIGTERM, signal.SIGHUP):  # which a test run in the background of a script inherits as ignored
    signal.signal(number, signal.SIG_DFL)
census.scan_segments = read_for_ever
sys.argv[0] = "hcache"
main.main()
"""


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["stat"], signal.SIGTERM),
        (["clear", "--namespace", NAMESPACE_ID.hex()], signal.SIGHUP),
        (["clear", "--yes", "--namespace", NAMESPACE_ID.hex()], signal.SIGTERM),
    ],
)
def test_it_ends_with_the_status_of_ctrl_c(
    tmp_path: Path, arguments: list[str], number: signal.Signals
) -> None:
    config = small_config(tmp_path)
    with closing(DiskStore.open(config, Counters())) as store:
        write_keys(store, make_keys(0, 4), (4096,))
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "store", *arguments, str(config.dirs[0])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reading\n"
        process.send_signal(number)
        assert process.wait(30) == 130
    DiskStore.open(config, Counters()).close()
