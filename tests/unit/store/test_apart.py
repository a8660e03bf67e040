"""Directories that were each used without the other, that came back without files, or while some could not be read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.record import digest
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys
from tests.unit.store.conftest import fail, is_healthy, kill, preads, save, sick, state_of, wait_until
from tests.unit.store.test_unread import RUNS, SIZES, found, found_at_a_start, only_in_second, write_without


def opened_without_second(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """Its second directory is back at once."""
    with monkeypatch.context() as patch:
        sick({config.dirs[1].name}, patch)
        return DiskStore.open(config, Counters())


def write_and_close(config: StoreConfig) -> None:
    store = DiskStore.open(config, Counters())
    for keys in RUNS:
        write_keys(store, keys, SIZES)
    store.close()


def test_what_one_directory_let_go_alone_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, counters = small_config(tmp_path, 2), Counters()
    write_without(config, None, RUNS, monkeypatch)
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(replace(config, retry_s=50.0), Counters())
        assert store.evict_one()
        store.close()
    for _ in range(4):
        write_without(config, 0, [make_keys(5000, 1)], monkeypatch)
    first, second = (state_of(path) for path in config.dirs)
    assert first.serial < second.serial
    assert second.segments.keys() - first.segments.keys()
    with StoreView.open(config.dirs) as view:
        assert not [item.what for item in check(view) if item.is_error]
    DiskStore.open(config, counters).close()
    assert counters["store.runs_lost"] == 0


def test_what_is_known_of_segments_in_a_directory_that_is_out_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    store = DiskStore.open(config, Counters())
    save(store)
    known, written = state_of(config.dirs[0]).segments, store.stats().written_today_bytes
    kill(store)
    with monkeypatch.context() as patch:
        sick({"disk1"}, patch)
        store = DiskStore.open(config, Counters())
        Inside(store).write_down()
        assert state_of(config.dirs[0]).segments == known
    wait_until(lambda: is_healthy(store))
    assert {item.number: item.score for item in Inside(store).catalog.segments()} == {
        number: item.score for number, item in known.items()
    }
    assert all(item.score for item in known.values())
    store.close()
    store = DiskStore.open(config, Counters())
    assert store.stats().written_today_bytes == written
    store.close()


def test_files_of_segments_that_could_not_be_read_in_another_directory_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, RUNS, monkeypatch)
    before = {path: path.stat().st_size for path in tmp_path.glob("disk*/*.seg")}
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        for _ in range(2):  # the second time they are known
            wait_until(lambda: is_healthy(store))
            Inside(store).space.tend()
            assert Inside(store).reserved_bytes - config.reserve_bytes > sum(before.values())
            Inside(store).volumes[1].health.take_out("the test says so")
        wait_until(lambda: is_healthy(store))
        assert not Inside(store).leftovers
        store.close()
    assert {path: path.stat().st_size for path in before} == before
    assert found_at_a_start(config) == len(RUNS)


def test_so_does_the_rest_of_a_file_whose_other_half_could_be_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[1].glob("*.seg")
    size, bad_from = path.stat().st_size, path.stat().st_size // 2
    with preads(lambda _, read: fail() if read.stop > bad_from else None):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: is_healthy(store))
        assert found(store) < len(RUNS)
        store.close()
    assert path.stat().st_size == size
    assert found_at_a_start(config) == len(RUNS)


def test_what_one_directory_could_not_be_read_of_is_believed_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many reads fail."""
    config = small_config(tmp_path, 2, segment=2**22, size=2**25)
    write_without(config, None, RUNS, monkeypatch)
    (path,) = config.dirs[1].glob("*.seg")
    bad_from = path.stat().st_size // len(RUNS)
    with preads(lambda file, read: fail() if file == path and read.stop > bad_from else None):
        assert found_at_a_start(config) == len(RUNS)


def test_they_go_together_when_room_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, 2)
    write_without(config, None, RUNS, monkeypatch)
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: is_healthy(store))
    while store.evict_one():
        assert not Inside(store).leftovers
    assert not [*tmp_path.glob("disk*/*.seg")]
    assert Inside(store).reserved_bytes == config.reserve_bytes
    store.close()


def test_a_file_of_a_store_of_fewer_directories_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, other = small_config(tmp_path / "two", 2), small_config(tmp_path / "one")
    write_without(config, None, RUNS[:2], monkeypatch)
    write_without(other, None, RUNS[2:], monkeypatch)
    for path in other.dirs[0].glob("*.seg"):
        shutil.copy(path, config.dirs[0] / path.name)
    store = DiskStore.open(config, Counters())
    assert found(store) == 0, "its file of the same number has replaced ours"
    store.close()


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("where", ["at the start", "later"])
def test_what_was_evicted_before_a_kill_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No state is written for it: that of an orderly stop says that nothing was deleted after it, others do not."""
    config, counters = small_config(tmp_path), Counters()
    write_and_close(config)
    unlink = StoreDirectory.unlink_segment

    def unlink_after_note(directory: StoreDirectory, segment: int) -> None:
        assert not state_of(directory.path).is_final
        unlink(directory, segment)

    monkeypatch.setattr(StoreDirectory, "unlink_segment", unlink_after_note)
    is_at_start = where == "at the start"
    store = DiskStore.open(replace(config, max_age_s=1e-3) if is_at_start else config, Counters())
    assert is_at_start or store.evict_one()
    kill(store)
    assert found(store) < len(RUNS)
    with StoreView.open(config.dirs) as view:
        assert len(view.state.segments) > store.stats().segments
        assert not view.lost
    DiskStore.open(config, counters).close()
    assert counters["store.runs_lost"] == 0


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("why", ["older", "not saved", "saved in one directory"])
def test_without_the_last_word_of_who_stopped_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It may have been deleted on purpose."""
    config, counters = small_config(tmp_path, 2), Counters()
    write_and_close(config)
    if why == "older":  # without that field
        for folder in config.dirs:
            fields = json.loads((folder / "state.json").read_bytes().partition(b"\n")[0])
            del fields["is_final"]
            line = json.dumps(fields).encode()
            (folder / "state.json").write_bytes(line + b'\n"%016x"\n' % digest(line))
    else:
        write = StoreDirectory.write_state

        def write_unless_sick(directory: StoreDirectory, text: bytes) -> None:
            if why == "not saved" or directory.path == config.dirs[1]:
                raise OSError(errno.EIO, "sick")
            write(directory, text)

        store = DiskStore.open(config, Counters())
        monkeypatch.setattr(StoreDirectory, "write_state", write_unless_sick)
        store.close()
        monkeypatch.undo()
    min(config.dirs[0].glob("*.seg")).unlink()
    with StoreView.open(config.dirs) as view:
        assert view.state.segments
        assert not view.lost
    store = DiskStore.open(config, counters)
    assert 0 < found(store) < len(RUNS)
    store.close()
    assert counters["store.runs_lost"] == 0


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("kind", ["deleted", "cut"])
def test_a_segment_that_lost_a_file_goes_everywhere_when_its_directory_is_back(
    tmp_path: Path, kind: str
) -> None:
    config = small_config(tmp_path, 2)
    store = DiskStore.open(config, Counters())
    for keys in RUNS:
        write_keys(store, keys, SIZES)
    lost = sorted(config.dirs[1].glob("*.seg"))[:3]
    for path in lost:
        if kind == "deleted":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size - 4096)
    Inside(store).space.reconcile(Inside(store).volumes[1])
    assert not [path for path in lost if (config.dirs[0] / path.name).exists()]
    store.close()


def test_files_that_lie_only_in_a_directory_that_is_back_stay_if_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = only_in_second(tmp_path, monkeypatch)
    with preads(lambda *_: fail()):
        store = opened_without_second(config, monkeypatch)
        wait_until(lambda: bool(Inside(store).catalog.segments()))
        Inside(store).space.tend()
        store.close()
    assert found_at_a_start(config) == len(RUNS)
