"""``hcache store`` while it reads an index: a signal that ends it leaves no copy of that."""

from __future__ import annotations

import os
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
import signal, sys
from sglang_hcache.cli import main
from sglang_hcache.store.index import Index

def read_for_ever(self, num_stripes, go_on):
    print("reading", flush=True)
    while True:
        go_on()

for number in (signal.SIGTERM, signal.SIGHUP):  # which a test run in the background of a script inherits as ignored
    signal.signal(number, signal.SIG_DFL)
Index.load = read_for_ever
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
def test_no_copy_of_the_index_stays(tmp_path: Path, arguments: list[str], number: signal.Signals) -> None:
    config, folder = small_config(tmp_path), tmp_path / "temporary"
    with closing(DiskStore.open(config, Counters())) as store:
        write_keys(store, make_keys(0, 4), (4096,))
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "store", *arguments, str(config.dirs[0])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reading\n"
        assert [path.name[:13] for path in folder.iterdir()] == ["hcache-index-"]
        process.send_signal(number)
        assert process.wait(30) == 130
    assert [*folder.iterdir()] == []
