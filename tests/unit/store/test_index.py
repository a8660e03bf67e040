"""The index beside other processes, and what of it is mapped into this one: nothing."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import (
    StoreLockedError,
    StoreTimeoutError,
    TemporaryFolderError,
)
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, index_files
from sglang_hcache.store.index import Index
from sglang_hcache.store.inspect.rebuild import rebuild
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.io_faults import without_sync
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (4096, 100)


def assert_not_mapped(config: StoreConfig) -> None:
    """A failing page of a mapped file would be SIGBUS: the end of the server."""
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(config.dirs[0].parent) in line]
    assert not [path for folder in config.dirs for path in folder.glob("*-shm")]


def test_no_file_of_the_store_is_mapped(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    assert_not_mapped(config)
    store.close()
    store = open_store(config)
    read_keys(store, make_keys(0, 2))
    write_keys(store, make_keys(10, 2), LAYERS)
    assert_not_mapped(config)
    Inside(store).volumes[0].health.take_out("test")
    wait_until(lambda: Inside(store).is_index_given_up)
    assert_not_mapped(config)


MAPPING = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("UPDATE segments SET last_used = 77")
assert os.path.exists(sys.argv[1] + "-shm")
os._exit(9)
"""


def test_what_a_killed_shell_that_mapped_the_log_wrote_is_read(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    store.close()
    path = config.dirs[0] / "index.sqlite"
    subprocess.run([sys.executable, "-c", MAPPING, path], check=False)
    assert path.with_name("index.sqlite-shm").exists()
    store = open_store(config)
    assert [segment.last_used for segment in Inside(store).catalog.segments()] == [77]
    read_keys(store, make_keys(0, 2))


def test_another_program_cannot_open_it_and_one_that_has_it_open_is_named(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    path = config.dirs[0] / "index.sqlite"
    shell = sqlite3.connect(path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        shell.execute("SELECT * FROM runs").fetchall()
    store.close()
    shell.execute("SELECT * FROM runs").fetchall()
    with pytest.raises(StoreLockedError, match="another program"):
        DiskStore.open(config, Counters())
    shell.close()
    read_keys(open_store(config), make_keys(0, 2))


VIEWER = """
import sys
from pathlib import Path
from sglang_hcache.store.inspect.view import StoreView
for _ in range(30):
    with StoreView.open([Path(name) for name in sys.argv[1:]]) as view:
        assert not view.index_problem, view.index_problem
        print(len(view.contents.runs), len(view.contents.bad_rows), flush=True)
"""


def test_another_process_sees_each_moment_whole_while_it_is_written(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """Checkpoints, and logs that begin anew, come in between all the time."""
    config = small_config(tmp_path, size=64 * 2**20)
    store = open_store(config, without_sync())
    stop, written = threading.Event(), [0]

    def write_on() -> None:
        while not stop.is_set():
            write_keys(store, make_keys(4 * written[0], 4), (100,))
            written[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        wait_until(lambda: written[0] > 10)
        found = subprocess.run(
            [sys.executable, "-c", VIEWER, *config.dirs], capture_output=True, text=True, check=False
        )
    finally:
        stop.set()
        thread.join()
    assert found.returncode == 0, found.stderr
    counts = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    assert len(counts) == 30
    assert counts == sorted(counts)
    assert 10 < counts[0][0] < counts[-1][0] <= written[0]
    assert {bad for _, bad in counts} == {0}


def test_an_index_that_never_stands_still_is_not_believed(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    path = config.dirs[0] / "index.sqlite"
    real = index_files._copy

    def copy(source: Path, target: Path, go_on: Callable[[], None]) -> None:
        real(source, target, go_on)
        with path.with_name("index.sqlite-wal").open("r+b") as log:  # as if the log began anew
            log.seek(16)
            log.write(os.urandom(8))

    monkeypatch.setattr(index_files, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(index_files, "_copy", copy)
    with pytest.raises(StoreTimeoutError, match="changed all the time"):
        Index.read(path, 1, Inside(store).ledger.identity.store_id)
    with StoreView.open(config.dirs) as view:
        assert "changed all the time" in view.index_problem
        assert view.is_index_slow
        assert len(view.contents.runs) == 1


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def nowhere(**_: object) -> None:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize(
    ("module", "name", "fails"),
    [("index_files", "_copy", full_disk), ("tempfile", "TemporaryDirectory", nowhere)],
)
def test_no_room_for_a_copy_says_nothing_of_the_index(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
    fails: Callable[..., None],
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    store.close()
    monkeypatch.setattr(getattr(index_files, module, index_files), name, fails)
    for look in (StoreView.open, rebuild):
        with pytest.raises(TemporaryFolderError, match=r"folder for temporary files.*; set TMPDIR"):
            look(config.dirs)


def test_a_read_only_home_opens_without_room_for_a_copy(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the segments."""
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    store.close()

    def read_only(_: StoreDirectory) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(StoreDirectory, "probe", read_only)
    monkeypatch.setattr(index_files, "_copy", full_disk)
    read_keys(open_store(config), make_keys(0, 2))


WITH_FEW_FILES = """
import os, resource, sys
from pathlib import Path
from sglang_hcache.core.errors import StoreError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import small_config

config, counters, opened = small_config(Path(sys.argv[1])), Counters(), 0
store = DiskStore.open(config, counters)
store.namespaces.put("note", "is kept")
store.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for spare in range(24):
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    for fd in held[len(held) - spare:]:
        os.close(fd)
    try:
        DiskStore.open(config, counters).close()
        opened += 1
    except StoreError:
        pass
    for fd in held[:len(held) - spare]:
        os.close(fd)
store = DiskStore.open(config, counters)
print(store.namespaces.get("note"), counters["store.index_rebuilds"], 0 < opened < 24)
store.close()
"""


def test_a_process_with_too_few_files_does_not_cost_the_index(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_FEW_FILES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == "is kept 0 True", done.stderr


def test_an_index_whose_entry_cannot_be_read_is_made_anew(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), LAYERS)
    store.close()
    inode, real = (config.dirs[0] / "index.sqlite").stat().st_ino, os.open

    def open_(path: Any, *args: Any, **how: Any) -> int:
        with os.scandir(config.dirs[0]) as entries:
            is_bad = str(path).endswith("index.sqlite") and inode in {entry.inode() for entry in entries}
        if is_bad:
            raise OSError(errno.EUCLEAN, "Structure needs cleaning")
        return real(path, *args, **how)

    monkeypatch.setattr(os, "open", open_)
    assert match_keys(open_store(config), make_keys(0, 2)) == 2
