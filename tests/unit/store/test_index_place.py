"""Where the index is: how long its directory is waited for, and what a rewriting in its place leaves at any moment."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreIOError, StoreTimeoutError
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.index import Index
from sglang_hcache.store.judge import Judge
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import ask_index, kill, wait_until

OpenStore = Callable[..., DiskStore]
LAYERS = (4096, 100)
OLD, NEW = make_keys(0, 4), make_keys(100, 4)


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
    for _ in range(4):
        with pytest.raises(StoreIOError, match="is out"):
            inside.ledger.quarantine(run.number, {1: "damaged"})
        inside.ledger.move_if_needed()
    home.health._retry_at = 0.0
    inside.keeper.round()
    assert home.health.writable
    assert inside.index is before, "neither moved nor written anew"
    assert ask_index(config.dirs[0] / "index.sqlite", "SELECT chunk, reason FROM quarantine") == [
        (1, "damaged")
    ]
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    assert match_keys(again, OLD) == 1
    read_keys(again, NEW)


@pytest.mark.usefixtures("no_keeper")
def test_it_moves_when_its_directory_has_been_out_for_long(tmp_path: Path, open_store: OpenStore) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    inside = Inside(store)
    inside.volumes[0].health.take_out("no answer within 5 s")
    inside.ledger.move_if_needed()
    assert not (config.dirs[1] / "index.sqlite").exists()
    assert inside.ledger._out_since is not None
    inside.ledger._out_since -= 3601
    inside.ledger.move_if_needed()
    assert (config.dirs[1] / "index.sqlite").exists()
    write_keys(store, NEW, LAYERS)


@pytest.mark.usefixtures("no_keeper")
def test_it_moves_at_once_when_its_directory_is_gone(tmp_path: Path, open_store: OpenStore) -> None:
    config = patient(tmp_path)
    store = open_store(config)
    config.dirs[0].rename(tmp_path / "away")
    config.dirs[0].write_text("not a directory")
    Inside(store).keeper.round()
    assert (config.dirs[1] / "index.sqlite").exists()
    write_keys(store, NEW, LAYERS)


@pytest.mark.usefixtures("no_keeper")
def test_what_comes_back_with_another_index_gets_ours(tmp_path: Path, open_store: OpenStore) -> None:
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
    assert inside.index is not None
    assert inside.index.is_in_place()
    write_keys(store, NEW, LAYERS)
    store.close()
    again = open_store(config)
    read_keys(again, OLD)
    read_keys(again, NEW)


@pytest.mark.usefixtures("no_keeper")
def test_a_kill_while_it_is_written_anew_in_its_place_leaves_the_old_one(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    inside.catalog.quarantine(inside.run_of(OLD[3]), {3: "damaged"})
    inside.ledger.quarantine(1, {3: "damaged"})
    inside.ledger._lost = True

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Index, "mark_complete", killed)
        with pytest.raises(KeyboardInterrupt):
            inside.ledger.move_if_needed()
    assert (config.dirs[0] / "index.tmp").exists()
    kill(store)
    again = open_store(config)
    assert match_keys(again, OLD) == 3, "a rebuilding would forget the quarantine"
    assert not list(config.dirs[0].glob("index.tmp*"))


@pytest.mark.usefixtures("no_keeper")
def test_nobody_waits_for_the_index_while_it_is_written_anew(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    write_keys(store, NEW, LAYERS)
    inside = Inside(store)
    inside.ledger._lost = True
    begun, go_on = threading.Event(), threading.Event()
    insert = Index.insert

    def slow(index: Index, *args: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        insert(index, *args)

    monkeypatch.setattr(Index, "insert", slow)
    moving = threading.Thread(target=inside.ledger.move_if_needed, daemon=True)
    moving.start()
    assert begun.wait(60)
    run, gone = inside.run_of(OLD[1]), inside.run_of(NEW[0])
    inside.catalog.quarantine(run, {1: "damaged"})
    with pytest.raises(StoreIOError, match="written anew"):
        inside.ledger.quarantine(run.number, {1: "damaged"})
    assert inside.catalog.drop_run(gone)
    judge: Judge = store._judge
    judge.forget_row(gone)
    go_on.set()
    moving.join(60)
    assert not moving.is_alive()
    inside.ledger.move_if_needed()
    path = config.dirs[0] / "index.sqlite"
    assert ask_index(path, "SELECT run FROM runs") == [(run.number,)]
    assert ask_index(path, "SELECT run, chunk FROM quarantine") == [(run.number, 1)]


def test_a_commit_that_hangs_and_takes_effect_later_costs_nothing(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(patient(tmp_path), io_timeout_s=0.5)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    inside = Inside(store)
    before, go_on, insert = inside.index, threading.Event(), Index.insert

    def hang(index: Index, *args: Any) -> None:
        go_on.wait(60)
        insert(index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "insert", hang)
        with pytest.raises(StoreTimeoutError):
            write_keys(store, NEW, LAYERS)
        assert not inside.volumes[0].health.readable
        go_on.set()
        wait_until(lambda: inside.volumes[0].health.writable)
    assert inside.index is before
    write_keys(store, NEW, LAYERS)
    for keys in (OLD, NEW):
        read_keys(store, keys)
    kill(store)
    again = open_store(config)
    for keys in (OLD, NEW):
        read_keys(again, keys)
    rows = ask_index(config.dirs[0] / "index.sqlite", "SELECT count(*) FROM runs")
    assert rows == [(len(Inside(again).catalog.runs()),)], "the row of files that are gone is dropped"
