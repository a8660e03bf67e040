"""Files that cannot be read while headers are looked for: nobody knows what is in them, so none is deleted."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.maintenance import collect
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import (
    make_keys,
    match_keys,
    read_keys,
    small_config,
    write_keys,
)
from tests.unit.store.conftest import conditions, fail, is_healthy, preads, sick, state_of, wait_until
from tests.unit.store.test_slow_start import Hang, Opening, hang

__all__ = ["hang"]
SIZES = (8192, 4096, 8192)
RUNS = [make_keys(10 * index, 4) for index in range(8)]


def write_without(
    config: StoreConfig, out: int | None, runs: Sequence[Sequence[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open it while directory ``out`` is, write, and close it."""
    with monkeypatch.context() as patch:
        if out is not None:
            sick({config.dirs[out].name}, patch)
        store = DiskStore.open(replace(config, retry_s=50.0), Counters())
        for keys in runs:
            write_keys(store, keys, SIZES)
        store.close()


def only_in_second(base: Path, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    """All runs lie in the second directory."""
    config = small_config(base, 2)
    write_without(config, None, [], monkeypatch)
    write_without(config, 0, RUNS, monkeypatch)
    return config


def found(store: DiskStore) -> int:
    return sum(match_keys(store, keys) == len(keys) for keys in RUNS)


def found_at_a_start(config: StoreConfig) -> int:
    store = DiskStore.open(config, Counters())
    try:
        return found(store)
    finally:
        store.close()


def test_a_directory_that_hangs_meanwhile_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    hang.folder = config.dirs[1]
    store = Opening(replace(config, io_timeout_s=2.0)).result()
    assert conditions(store) == ["healthy", "out"]
    hang.let_go()
    wait_until(lambda: is_healthy(store))
    store.close()
    assert found_at_a_start(config) == len(RUNS)


@pytest.mark.parametrize("is_open", [True, False])
def test_files_that_cannot_be_read_for_a_while_are_served_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    config = small_config(tmp_path)
    write_without(config, None, RUNS, monkeypatch)
    before = {path: path.stat().st_size for path in config.dirs[0].glob("*.seg")}
    with monkeypatch.context() as patch:
        if not is_open:
            patch.setattr(StoreDirectory, "open_to_read", lambda *_: fail())
        with preads(lambda *_: fail()):
            store = DiskStore.open(config, Counters())
    assert found(store) == 0
    assert store.stats().used_bytes > sum(before.values()), "they count"
    store.close()
    assert {path: path.stat().st_size for path in before} == before
    store = DiskStore.open(config, Counters())
    assert found(store) == len(RUNS)
    for keys in RUNS:
        read_keys(store, keys)
    store.close()


def test_they_go_when_their_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    write_without(config, None, RUNS, monkeypatch)
    before = [*config.dirs[0].glob("*.seg")]
    with preads(lambda *_: fail()):
        store = DiskStore.open(config, Counters())
    write_keys(store, make_keys(1000, 4), SIZES)
    for _ in before:
        assert store.evict_one()
    assert not [path for path in before if path.exists()]
    assert match_keys(store, make_keys(1000, 4)) == 4
    store.close()


def test_a_file_of_many_headers_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than one operation may."""
    config = replace(small_config(tmp_path, segment=2**22, size=2**25), io_timeout_s=1.0)
    runs = [make_keys(10 * index, 1) for index in range(40)]
    store = DiskStore.open(config, Counters())
    for keys in runs:
        write_keys(store, keys, (90_000,))
    store.close()
    with preads(lambda *_: time.sleep(0.06)):
        store = DiskStore.open(config, Counters())
    assert conditions(store) == ["healthy"]
    assert all(match_keys(store, keys) for keys in runs)
    store.close()


def test_starts_that_miss_different_directories_use_different_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, [], monkeypatch)
    runs = [[make_keys(1000 * turn + 10 * index, 4) for index in range(8)] for turn in range(4)]
    for turn, of_turn in enumerate(runs):
        write_without(config, turn % 2, of_turn, monkeypatch)
    store = DiskStore.open(config, Counters())
    assert all(match_keys(store, keys) == 4 for of_turn in runs for keys in of_turn)
    store.close()


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_a_check_names_a_directory_that_went_out_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, RUNS, monkeypatch)
    error = errno.ETIMEDOUT if how == "hangs" else errno.ENODEV
    with preads(lambda *_: fail(error)), StoreView.open(config.dirs) as view:
        errors = [finding.what for finding in check(view) if finding.is_error]
    assert [what.partition(":")[0] for what in errors] == [*map(str, config.dirs)]


def test_an_unread_segment_is_known_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are not lost, nor counted again as written, and its score lasts."""
    config = replace(small_config(tmp_path), write_budget_bytes=10**9)
    write_without(config, None, RUNS, monkeypatch)
    before, counters = state_of(config.dirs[0]), Counters()
    with preads(lambda *_: fail()):
        with StoreView.open(config.dirs) as view:
            errors = [finding.what for finding in check(view) if finding.is_error]
            assert not view.lost
        store = DiskStore.open(config, counters)
    assert sorted(errors) == sorted(f"{path}: cannot be read" for path in config.dirs[0].glob("*.seg"))
    written = store.stats().written_today_bytes
    store.close()
    assert state_of(config.dirs[0]).segments == before.segments
    store = DiskStore.open(config, counters)
    assert store.stats().written_today_bytes == written > 0
    assert counters["store.runs_lost"] == 0
    assert found(store) == len(RUNS)
    store.close()


@pytest.mark.parametrize("stripe", [0, 1])
def test_a_file_whose_end_cannot_be_read_keeps_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stripe: int
) -> None:
    config = small_config(tmp_path, 2, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[stripe].glob("*.seg")
    with StoreView.open(config.dirs) as view:
        last = view.places[-1]
    with preads(lambda read, at: read == path and last.offsets[stripe] in at and fail()):
        DiskStore.open(config, Counters()).close()
    assert found_at_a_start(config) == len(RUNS)


def test_what_lies_behind_a_failed_read_is_not_said_to_be_of_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[0].glob("*.seg")
    with StoreView.open(config.dirs) as view:
        bad = view.places[3].offsets[0]
    with preads(lambda _, at: bad in at and fail()):
        with StoreView.open(config.dirs) as view:
            assert [finding.what for finding in check(view)] == [f"{path}: cannot be read"]
        collect(config.dirs)
    assert found_at_a_start(config) == len(RUNS)


def test_a_device_that_says_nothing_of_holes_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    write_without(config, None, RUNS, monkeypatch)
    heads = {}
    for path in config.dirs[0].glob("*.seg"):
        with path.open("r+b") as file:
            heads[path] = file.read(4096)
            file.seek(0)
            file.write(bytes(4096))

    with monkeypatch.context() as patch:
        patch.setattr(os, "lseek", lambda *_: fail())
        DiskStore.open(config, Counters()).close()
    for path, head in heads.items():
        with path.open("r+b") as file:
            file.write(head)
    assert found_at_a_start(config) == len(RUNS)


@pytest.mark.usefixtures("no_keeper")
def test_a_state_that_one_directory_does_not_take_is_not_written_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    store = DiskStore.open(replace(config, retry_s=50.0), Counters())
    write_keys(store, RUNS[0], SIZES)
    write_state, written = StoreDirectory.write_state, []

    def full(self: StoreDirectory, text: bytes) -> None:
        if self.path == config.dirs[1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(text)
        write_state(self, text)

    monkeypatch.setattr(StoreDirectory, "write_state", full)
    write_keys(store, RUNS[1], SIZES)
    for _ in range(5):
        time.sleep(0.05)  # longer than a state keeps the next one waiting for its bytes
        Inside(store).write_down()
    assert 0 < len(written) < 4
    monkeypatch.setattr(StoreDirectory, "write_state", write_state)
    store.close()


def test_a_state_of_another_store_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    write_without(config, None, RUNS, monkeypatch)
    (config.dirs[0] / "superblock.json").unlink()
    for path in config.dirs[0].glob("*.seg"):
        path.unlink()
    counters = Counters()
    store = DiskStore.open(config, counters)
    assert counters["store.runs_lost"] == store.stats().written_today_bytes == 0
    store.close()
