"""Erasing one namespace of a store whose segments hold several."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.store import DiskStore, StoreConfig, recovery
from sglang_hcache.store.index import Index
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.maintenance import erase
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    chunk_payload,
    make_run,
    payload_of,
    physical_bytes,
    small_config,
)
from tests.unit.store.conftest import CHUNKS, keys_of, served

OpenStore = Callable[..., DiskStore]
LAYERS = (8192, 5000, 4096)
RUNS = 8
GOING, STAYING = b"a tenant to go.."[:16], b"the others stay."[:16]


def namespace_of(number: int) -> bytes:
    """Two runs share a segment: the first segments are mixed, one is of the namespace that goes, one is not."""
    return (GOING, STAYING, STAYING, GOING, GOING, GOING, STAYING, STAYING)[number]


@pytest.fixture
def closed(tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for number in range(RUNS):
        run = replace(make_run(keys_of(number), LAYERS), namespace_id=namespace_of(number))
        store.write_run(run, payload_of(run))
    assert store.stats().segments == 4
    for namespace_id in (GOING, STAYING):
        store.namespaces.put(namespace_id.hex(), "{}")
    store.close()
    return config


def traces(config: StoreConfig) -> Iterator[str]:
    """What is left of the namespace that goes, in any file."""
    numbers = [number for number in range(RUNS) if namespace_of(number) == GOING]
    payloads = [bytes(chunk_payload(key, 0, 64)) for number in numbers for key in keys_of(number)]
    secrets = [GOING, *(key for number in numbers for key in keys_of(number)), *payloads]
    for directory in config.dirs:
        for path in directory.iterdir():
            data = path.read_bytes()
            yield from (f"{path.name}: {secret.hex()}" for secret in secrets if secret in data)


def assert_only_others_are_left(config: StoreConfig, open_store: OpenStore) -> None:
    assert not [*traces(config)]
    with StoreView.open(config.dirs) as view:
        assert [item.namespace_id for item in view.namespaces()] == [STAYING]
        assert check(view) == []
    others = [number for number in range(RUNS) if namespace_of(number) == STAYING]
    assert served(config, open_store, RUNS) == others
    (config.dirs[0] / "index.sqlite").unlink()
    assert served(config, open_store, RUNS) == others, "nor is anything found by its headers"


def test_a_namespace_goes_and_the_others_stay(closed: StoreConfig, open_store: OpenStore) -> None:
    before = physical_bytes(closed.dirs)
    assert [*traces(closed)]
    times = {path: path.stat().st_mtime_ns for path in closed.dirs[0].glob("segment-*")}

    erased, change = erase(closed.dirs, {GOING})

    assert (erased.chunks, erased.runs) == (4 * CHUNKS, 4)
    assert (change.before.chunks, change.after.chunks) == (RUNS * CHUNKS, 4 * CHUNKS)
    assert physical_bytes(closed.dirs) < 0.7 * before
    left = {path: path.stat().st_mtime_ns for path in closed.dirs[0].glob("segment-*")}
    assert len(left) == 3
    assert left.items() <= times.items(), "chunks of others are as old as before"
    assert_only_others_are_left(closed, open_store)
    erased, _ = erase(closed.dirs, {GOING})
    assert (erased.chunks, erased.runs) == (0, 0)


def test_what_was_deleted_does_not_come_back_after_a_power_cut(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Path]] = []
    unlink, sync = StoreDirectory.unlink_segment, StoreDirectory.sync

    def unlink_noted(self: StoreDirectory, segment: int) -> None:
        unlink(self, segment)
        done.append(("unlink", self.path))

    def sync_noted(self: StoreDirectory) -> None:
        sync(self)
        done.append(("sync", self.path))

    monkeypatch.setattr(StoreDirectory, "unlink_segment", unlink_noted)
    monkeypatch.setattr(StoreDirectory, "sync", sync_noted)
    erase(closed.dirs, {GOING})
    for path in closed.dirs:
        steps = [step for step, where in done if where == path]
        assert "unlink" in steps
        assert steps[-1] == "sync"


DYING = """
import os, signal, sys
from pathlib import Path
from sglang_hcache.store.inspect.maintenance import erase
from sglang_hcache.store.ledger import Ledger
from sglang_hcache.store.volumes.directory import StoreDirectory

steps = int(sys.argv[1])

def dying(original):
    def step(*arguments):
        global steps
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps -= 1
        original(*arguments)
    return step

StoreDirectory.keep_of_segment = dying(StoreDirectory.keep_of_segment)
StoreDirectory.unlink_segment = dying(StoreDirectory.unlink_segment)
Ledger.delete_runs = dying(Ledger.delete_runs)
erase([Path(name) for name in sys.argv[3:]], {bytes.fromhex(sys.argv[2])})
"""


@pytest.mark.parametrize("survived", range(10))
def test_it_goes_on_after_a_kill(closed: StoreConfig, open_store: OpenStore, survived: int) -> None:
    """Killed at each step: before a file is changed or deleted, and before rows go."""
    command = [sys.executable, "-c", DYING, str(survived), GOING.hex(), *map(str, closed.dirs)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    erase(closed.dirs, {GOING})
    assert_only_others_are_left(closed, open_store)


def test_bytes_between_the_runs_of_others_go_as_well(closed: StoreConfig, open_store: OpenStore) -> None:
    """A run without a row, such as one whose writing was given up: an index that is made anew would find it."""
    with StoreView.open(closed.dirs) as view:
        rows = [run.number for run in view.runs() if run.place.namespace_id == GOING]
    store = open_store(closed)
    store._ledger.delete_runs(rows)
    store.close()
    assert [*traces(closed)]
    erased, _ = erase(closed.dirs, {GOING})
    assert erased.runs == 0
    assert_only_others_are_left(closed, open_store)


def test_what_is_in_quarantine_goes_as_well(closed: StoreConfig, open_store: OpenStore) -> None:
    store = open_store(closed)
    run = store._catalog._chunks[keys_of(0)[0]]
    store._catalog.quarantine(run, {0: "bad"})
    store._ledger.outdate(run)
    store.close()
    erased, _ = erase(closed.dirs, {GOING})
    assert (erased.chunks, erased.runs) == (4 * CHUNKS - 1, 4)
    assert_only_others_are_left(closed, open_store)


def test_a_directory_that_is_missing_is_an_error(closed: StoreConfig) -> None:
    os.rename(closed.dirs[1], closed.dirs[1].with_name("away"))
    with pytest.raises(StoreIOError, match="this needs all directories"):
        erase(closed.dirs, {GOING})


def test_a_file_that_cannot_be_changed_is_an_error(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: StoreDirectory, segment: int, kept: Sequence[tuple[int, int]]) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(StoreDirectory, "keep_of_segment", fail)
    with pytest.raises(StoreIOError, match="cannot erase parts of a segment file"):
        erase(closed.dirs, {GOING})


def test_a_file_that_cannot_be_deleted_is_an_error(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(StoreDirectory, "unlink_segment", fail)
    with pytest.raises(StoreIOError, match="cannot be deleted: segments 2"):
        erase(closed.dirs, {GOING})


@pytest.fixture
def alone(tmp_path: Path, open_store: OpenStore) -> StoreConfig:
    """The namespace that goes shares no segment with the other one."""
    config = small_config(tmp_path, 2)
    store = open_store(config)
    for number in range(4):
        run = replace(make_run(keys_of(number), LAYERS), namespace_id=(GOING, STAYING)[number // 2])
        store.write_run(run, payload_of(run))
    for namespace_id in (GOING, STAYING):
        store.namespaces.put(namespace_id.hex(), "{}")
    store.close()
    return config


def lost(config: StoreConfig) -> list[str]:
    """Where the first keys of the namespace that goes are, or its ID."""
    secrets = [GOING, GOING.hex().encode(), *keys_of(0)]
    files = {path.name: path.read_bytes() for directory in config.dirs for path in directory.iterdir()}
    return [name for name, data in files.items() if any(secret in data for secret in secrets)]


def test_rows_that_could_not_be_deleted_with_their_segment_go_in_the_end(
    alone: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreIOError("the index failed")

    monkeypatch.setattr(Index, "delete_segment", fail)
    erase(alone.dirs, {GOING})
    assert lost(alone) == []


@pytest.mark.parametrize("step", ["delete_runs", "save_meta", "empty_log"])
def test_an_index_that_keeps_something_is_an_error(
    alone: StoreConfig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(_: Index, *given: object) -> None:
        if given != ([],):  # of segments of which nothing goes
            raise StoreIOError("the index failed")

    with monkeypatch.context() as patch:
        patch.setattr(Index, step, fail)
        with pytest.raises(StoreIOError, match="the index failed"):
            erase(alone.dirs, {GOING})
    assert lost(alone) or step == "empty_log", "closing it empties the log as well, in this case"
    erase(alone.dirs, {GOING})
    assert lost(alone) == []


def test_rows_that_the_start_could_not_delete_go_as_well(
    alone: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a segment whose files are gone: the store does not know them."""
    with StoreView.open(alone.dirs) as view:
        number = view.runs()[0].place.segment
    for directory in alone.dirs:
        (directory / f"segment-{number:08}.seg").unlink()
    monkeypatch.setattr(recovery, "_try_delete", lambda *_: None)
    erased, _ = erase(alone.dirs, {GOING})
    assert erased.runs == 0
    assert lost(alone) == []


def test_nothing_is_left_to_be_done_when_the_index_is_closed(
    alone: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that does not get into the database leaves older pages there."""
    left_open: list[Index] = []
    monkeypatch.setattr(Index, "close", lambda index: left_open.append(index))
    erase(alone.dirs, {GOING})
    assert lost(alone) == []
    monkeypatch.undo()
    for index in left_open:
        index.close()


def test_an_index_that_was_given_up_in_a_directory_that_is_out_is_an_error(
    alone: StoreConfig, open_store: OpenStore
) -> None:
    inside = Inside(open_store(alone))
    assert inside.keeper.close(5)
    inside.ledger.is_given_up = True
    inside.ledger.empty_log()
    inside.volumes[inside.ledger.identity.index_stripe].health.take_out("gone")
    with pytest.raises(StoreIOError, match=r"may still be in .*, which is out: gone"):
        inside.ledger.empty_log()
