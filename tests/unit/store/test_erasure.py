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
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.maintenance import erase
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
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
        store.namespaces.put(namespace_id.hex(), {})
    store.close()
    return config


def traces(config: StoreConfig) -> Iterator[str]:
    """What is left of the namespace that goes, in any file."""
    numbers = [number for number in range(RUNS) if namespace_of(number) == GOING]
    payloads = [bytes(chunk_payload(key, 0, 64)) for number in numbers for key in keys_of(number)]
    secrets = [
        GOING,
        GOING.hex().encode(),
        *(key for number in numbers for key in keys_of(number)),
        *payloads,
    ]
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
    for folder in config.dirs:
        (folder / "state.json").unlink()
    assert served(config, open_store, RUNS) == others, "nor is anything found without the state"


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
StoreDirectory.write_state = dying(StoreDirectory.write_state)
erase([Path(name) for name in sys.argv[3:]], {bytes.fromhex(sys.argv[2])})
"""


@pytest.mark.parametrize("survived", range(14))
def test_it_goes_on_after_a_kill(closed: StoreConfig, open_store: OpenStore, survived: int) -> None:
    """Killed at each step: before a file is changed or deleted, and before a state is written."""
    command = [sys.executable, "-c", DYING, str(survived), GOING.hex(), *map(str, closed.dirs)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    with StoreView.open(closed.dirs) as view:
        assert not [item for item in check(view) if item.is_error and "of no run" not in item.what]
        is_listed = GOING in [item.namespace_id for item in view.namespaces()]
    # In files that others share; what goes as a whole is deleted, which the next start brings to its end.
    payloads = [bytes(chunk_payload(key, 0, 64)) for number in (0, 3) for key in keys_of(number)]
    data = [path.read_bytes() for folder in closed.dirs for path in folder.glob("*-0000000[01].seg")]
    assert is_listed or not any(payload in part for payload in payloads for part in data), (
        "bytes without a name"
    )
    erase(closed.dirs, {GOING})
    assert_only_others_are_left(closed, open_store)


def test_bytes_between_the_runs_of_others_go_as_well(closed: StoreConfig, open_store: OpenStore) -> None:
    """A run that is found by no header, such as one whose writing was given up."""
    with StoreView.open(closed.dirs) as view:
        places = [run.place for run in view.runs() if run.place.namespace_id == GOING]
    for place in places:
        for folder, offset, size in zip(closed.dirs, place.offsets, place.shape.part_bytes, strict=True):
            if size:
                with open(folder / f"segment-{place.segment:08d}.seg", "r+b") as file:
                    file.seek(offset)
                    file.write(bytes(4096))
    assert [*traces(closed)]
    erased, _ = erase(closed.dirs, {GOING})
    assert erased.runs == 0
    assert_only_others_are_left(closed, open_store)


def test_what_is_in_quarantine_goes_as_well(closed: StoreConfig, open_store: OpenStore) -> None:
    store = open_store(closed)
    run = store._catalog._chunks[keys_of(0)[0]]
    store._catalog.quarantine(run, {0: "bad"})
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
    for folder in closed.dirs:  # of no run
        StoreDirectory(folder).segment_path(3).rename(StoreDirectory(folder).segment_path(9))
    with pytest.raises(StoreIOError, match=r"cannot be deleted: segments 2, 9$"):
        erase(closed.dirs, {GOING})


@pytest.mark.parametrize("failing", [(0, 1), (0,), (1,)])
def test_a_state_that_cannot_be_written_is_an_error(
    closed: StoreConfig, monkeypatch: pytest.MonkeyPatch, open_store: OpenStore, failing: tuple[int, ...]
) -> None:
    """It says whose the namespace was."""
    write_state, sick = StoreDirectory.write_state, {closed.dirs[index] for index in failing}

    def fail(self: StoreDirectory, text: bytes) -> None:
        if self.path in sick:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_state(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "write_state", fail)
        with pytest.raises(StoreIOError, match=r"cannot write the state|takes writes|older state"):
            erase(closed.dirs, {GOING})
    erase(closed.dirs, {GOING})
    assert_only_others_are_left(closed, open_store)


@pytest.mark.parametrize(("num_dirs", "stay"), [(1, [1, 2]), (2, [1, 2, 6, 7])])
def test_runs_that_could_not_be_read_go_as_well_and_are_not_lost(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, num_dirs: int, stay: list[int]
) -> None:
    """Nobody knows whose they are, unless another directory has headers of them."""
    config = small_config(tmp_path, num_dirs, segment=2**24, size=2**27)
    store = open_store(config)
    for number in range(RUNS):
        run = replace(make_run(keys_of(number), (100_000,) * 3), namespace_id=namespace_of(number))
        store.write_run(run, payload_of(run))
    store.close()
    with StoreView.open(config.dirs) as view:
        bad = view.places[3].offsets[0]
    pread = os.pread

    def failing(fd: int, size: int, offset: int) -> bytes:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.parent == config.dirs[0] and path.suffix == ".seg" and offset <= bad < offset + size:
            raise OSError(errno.EIO, "bad sector")
        return pread(fd, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        erase(config.dirs, [GOING])
    assert not [*traces(config)]
    with StoreView.open(config.dirs) as view:
        assert check(view) == []
    assert served(config, open_store, RUNS) == stay
