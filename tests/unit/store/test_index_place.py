"""An index that cannot be written to: how long its directory is waited for, and what giving it up leaves behind."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreError, StoreIOError, StoreTimeoutError
from sglang_hcache.store import DiskStore, StoreConfig, ledger
from sglang_hcache.store.index import Index
from sglang_hcache.store.volumes.health import Health
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import ask_index, kill, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (4096, 100)
OLD, NEW, LATER = make_keys(0, 4), make_keys(100, 4), make_keys(200, 4)


def patient(base: Path, num_dirs: int = 2) -> StoreConfig:
    return replace(small_config(base, num_dirs), index_patience_s=3600.0)


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("num_dirs", [1, 2])
def test_an_index_whose_directory_is_soon_back_is_used_again(
    tmp_path: Path, open_store: OpenStore, num_dirs: int
) -> None:
    config = patient(tmp_path, num_dirs)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    before, home = inside.index, inside.volumes[0]
    home.health.take_out("no answer within 5 s")
    run = inside.run_of(OLD[1])
    inside.catalog.quarantine(run, {1: "damaged"})
    inside.ledger.outdate(run)
    for _ in range(4):
        with pytest.raises(StoreIOError, match="is out"):
            inside.ledger.save_runs()
        inside.ledger.settle()
    home.health._retry_at = 0.0
    inside.keeper.round()
    assert home.health.writable
    assert inside.index is before
    assert not inside.is_index_given_up
    assert ask_index(config.dirs[0] / "index.sqlite", "SELECT chunk, reason FROM quarantine") == [
        (1, "damaged")
    ]
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    assert match_keys(again, OLD) == 1
    read_keys(again, NEW)


@pytest.mark.usefixtures("no_keeper")
def test_it_is_given_up_when_its_directory_has_been_out_for_long(
    tmp_path: Path, open_store: OpenStore
) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    inside = Inside(store)
    inside.volumes[0].health.take_out("no answer within 5 s")
    inside.ledger.settle()
    with pytest.raises(StoreIOError, match="is out"):
        write_keys(store, NEW, LAYERS)
    assert inside.ledger._away_since is not None
    inside.ledger._away_since -= 3601
    inside.ledger.settle()
    assert inside.is_index_given_up
    write_keys(store, NEW, LAYERS)


@pytest.mark.usefixtures("no_keeper")
def test_it_is_given_up_at_once_when_its_directory_is_gone(tmp_path: Path, open_store: OpenStore) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    config.dirs[0].rename(tmp_path / "away")
    config.dirs[0].write_text("not a directory")
    Inside(store).keeper.round()
    assert Inside(store).is_index_given_up
    write_keys(store, NEW, LAYERS)


@pytest.mark.usefixtures("no_keeper")
def test_what_comes_back_with_another_index_is_not_written_to(tmp_path: Path, open_store: OpenStore) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    home = inside.volumes[0]
    home.health.take_out("gone")
    path = home.path / "index.sqlite"
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    home.health._retry_at = 0.0
    inside.keeper.round()
    assert inside.is_index_given_up
    assert not path.exists()
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    read_keys(again, OLD)
    read_keys(again, NEW)


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("end", [DiskStore.close, kill])
@pytest.mark.parametrize("step", ["none", "remove", "removed", "publish", "published", "all"])
@pytest.mark.parametrize(("num_dirs", "is_gone"), [(1, False), (2, False), (2, True)])
def test_it_may_end_at_any_step_of_giving_it_up(
    tmp_path: Path,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    num_dirs: int,
    is_gone: bool,
    step: str,
    end: Callable[[DiskStore], None],
) -> None:
    """Of a damaged index or of one whose directory is gone for now: nothing that was stored before or later is lost."""
    config = patient(tmp_path, num_dirs)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    inside.ledger._is_bad = True
    if is_gone:
        inside.volumes[0].health.mark_missing("the test says so")
    with pytest.raises(StoreIOError):
        write_keys(store, NEW, LAYERS)

    def killed(function: Callable[..., None], *, before: bool) -> Callable[..., None]:
        def run(*args: Any) -> None:
            if not before:
                function(*args)
            raise KeyboardInterrupt

        return run

    steps = {
        "remove": "remove_index",
        "removed": "remove_index",
        "publish": "publish",
        "published": "publish",
    }
    with monkeypatch.context() as patch:
        if step in steps:
            function = getattr(ledger, steps[step])
            patch.setattr(ledger, steps[step], killed(function, before=step == steps[step][:7]))
            with pytest.raises(KeyboardInterrupt):
                inside.ledger.settle()
        elif step == "all":
            inside.ledger.settle()
            write_keys(store, NEW, LAYERS)
            run = inside.run_of(OLD[3])
            inside.catalog.quarantine(run, {3: "damaged"})
            inside.ledger.outdate(run)
            inside.ledger.save_runs()
    end(store)
    again = open_store(config)
    read_keys(again, OLD)
    if step == "all":
        read_keys(again, NEW)
        assert again.stats().totals["index_rebuilds"] == 1
    write_keys(again, LATER, LAYERS)
    kill(again)
    again = open_store(config)
    read_keys(again, LATER)
    assert "index_rebuilds" not in again.stats().totals or step not in ("none", "remove")


def test_a_commit_that_hangs_and_takes_effect_later_costs_nothing(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    before, go_on, insert = inside.index, threading.Event(), Index.insert
    home = inside.volumes[0]

    def hang(index: Index, *args: Any) -> None:
        go_on.wait(60)
        insert(index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "insert", hang)
        with monkeypatch.context() as hurried:
            hurried.setattr(home, "patience_s", 0.5)
            with pytest.raises(StoreTimeoutError):
                write_keys(store, NEW, LAYERS)
        assert not home.health.readable
        go_on.set()
        wait_until(lambda: home.health.writable)
    assert inside.index is before
    write_keys(store, NEW, LAYERS)
    for keys in (OLD, NEW):
        read_keys(store, keys)
    kill(store)
    again = open_store(config)
    for keys in (OLD, NEW):
        read_keys(again, keys)
    rows = ask_index(config.dirs[0] / "index.sqlite", "SELECT count(*) FROM runs")
    assert rows == [(len(Inside(again).runs()),)], "the row of files that are gone is dropped"


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("num_dirs", [1, 2])
def test_failures_of_a_directory_that_takes_no_writes_are_not_the_indexs(
    tmp_path: Path, open_store: OpenStore, num_dirs: int
) -> None:
    store = open_store(patient(tmp_path, num_dirs))
    inside = Inside(store)
    index, home = inside.index, inside.volumes[0].health

    def fails(_values: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "save_meta", fails)
        for _ in range(6):
            with pytest.raises(StoreIOError):
                inside.ledger.save_meta({"a": "b"})
    assert not home.writable
    inside.ledger.settle()
    home.recover(home.condition)
    inside.ledger.settle()
    assert not inside.is_index_given_up
    assert inside.index is index


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("num_dirs", [1, 2])
def test_an_index_that_could_only_be_read_at_start_is_written_to_later(
    tmp_path: Path, open_store: OpenStore, num_dirs: int
) -> None:
    """Its file system was mounted read-only: no reason to give up what it knows."""
    config = patient(tmp_path, num_dirs)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    store.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Health, "writable", property(lambda self: "disk0" not in str(self._path)))
        store = open_store(config)
        inside = Inside(store)
        assert match_keys(store, OLD) == len(OLD)
        inside.ledger.settle()
        assert not inside.is_index_given_up
        with pytest.raises(StoreError):
            write_keys(store, NEW, LAYERS)
    inside.ledger.settle()
    assert not inside.is_index_given_up
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    assert match_keys(again, OLD) == match_keys(again, NEW) == 4


@pytest.mark.usefixtures("no_keeper")
def test_rows_that_could_not_be_deleted_at_start_clash_with_no_new_run(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """The disk was full: the index was only read, of segments that are gone."""
    config = patient(tmp_path, 1)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    store.close()
    for path in config.dirs[0].glob("*.seg"):
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Health, "writable", property(lambda self: False))
        store = open_store(config)
    inside = Inside(store)
    inside.ledger.settle()
    assert not inside.is_index_given_up
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    assert (match_keys(again, OLD), match_keys(again, NEW)) == (0, len(NEW))


@pytest.mark.usefixtures("no_keeper")
def test_an_index_that_takes_deletions_and_no_runs_is_given_up(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(patient(tmp_path))
    inside = Inside(store)

    def refuse(*_: object) -> None:
        raise StoreIOError("the index failed: disk I/O error")

    monkeypatch.setattr(Index, "insert", refuse)
    for key in range(3):
        inside.ledger.save_meta({"notes": "{}"})  # works
        inside.ledger.settle()
        assert not inside.is_index_given_up
        with pytest.raises(StoreIOError, match="disk I/O error"):
            write_keys(store, make_keys(key, 1), LAYERS)
    inside.ledger.settle()
    assert inside.is_index_given_up


@pytest.mark.usefixtures("no_keeper")
def test_nothing_is_written_that_could_not_be_committed(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(patient(tmp_path))
    inside = Inside(store)
    inside.volumes[0].health.take_out("no answer within 5 s")
    before = inside.volumes[1].segment_sizes()
    with pytest.raises(StoreIOError, match="the index cannot be written"):
        write_keys(store, NEW, LAYERS)
    assert inside.volumes[1].segment_sizes() == before
