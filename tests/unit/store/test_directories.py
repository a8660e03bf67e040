"""Private, locked, in the right order."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.core.errors import (
    ConfigError,
    StoreError,
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
)
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, look_ahead
from sglang_hcache.store.format.record import FORMAT_VERSION
from sglang_hcache.store.inspect.rebuild import rebuild
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.directory import StoreDirectory
from sglang_hcache.store.volumes.looking import SeenDirectory
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, match_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import is_healthy, wait_until

OpenStore = Callable[..., DiskStore]


def open_fails(config: StoreConfig, kind: type[StoreError], match: str) -> None:
    with pytest.raises(kind, match=match):
        DiskStore.open(config, Counters())


def test_everything_is_private_whatever_the_umask(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path / "parent", 2)
    old = os.umask(0)
    try:
        store = open_store(config)
        write_keys(store, make_keys(0, 2), (4096, 4096))
    finally:
        os.umask(old)
    for directory in config.dirs:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        names = {path.name for path in directory.iterdir()}
        assert {"lock", "superblock.json", "segment-00000000.seg"} <= names
        assert "probe.tmp" not in names
        for path in directory.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    wait_until(lambda: all((folder / "state.json").exists() for folder in config.dirs))
    for folder in config.dirs:
        assert stat.S_IMODE((folder / "state.json").stat().st_mode) == 0o600


def test_a_directory_others_may_read_is_closed(tmp_path: Path, open_store: OpenStore) -> None:
    config = small_config(tmp_path)
    config.dirs[0].mkdir()
    config.dirs[0].chmod(0o755)
    open_store(config)
    assert stat.S_IMODE(config.dirs[0].stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    config = small_config(tmp_path)
    config.dirs[0].mkdir()
    config.dirs[0].chmod(mode)
    open_fails(config, StoreFormatError, "can be written by other users.*chmod 700 .*fsGroup")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path)
    config.dirs[0].mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    open_fails(config, StoreFormatError, "belongs to user")


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.dirs[0].write_text("")
    open_fails(config, StoreFormatError, "not a directory.*--hcache-dirs")


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda config: DiskStore.open(config, Counters()), "holds other files.*thesis"),
        (look_ahead, "holds other files.*thesis"),
        (lambda config: rebuild(config.dirs), "no store is in"),
    ],
)
def test_a_directory_with_files_of_something_else_is_left_alone(
    tmp_path: Path, use: Callable[[StoreConfig], object], problem: str
) -> None:
    config = small_config(tmp_path)
    (folder,) = config.dirs
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "thesis.tex").write_text("")
    with pytest.raises(StoreFormatError, match=problem):
        use(config)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_looking_ahead_makes_nothing_and_sees_who_is_there(tmp_path: Path, open_store: OpenStore) -> None:
    config, none = small_config(tmp_path / "mine", 2), tmp_path / "none" / "yet"
    open_store(config)
    holders = look_ahead(config).holders
    assert {path: holder.pid for path, holder in holders.items()} == dict.fromkeys(
        config.dirs, str(os.getpid())
    )
    assert look_ahead(replace(config, dirs=(none,))).holders == {}
    assert not none.parent.exists()


@pytest.mark.parametrize(
    ("total", "way_out"),
    [
        (0, "has 0 B; put --hcache-dirs elsewhere"),
        (
            7 * 10**9,
            "has 7.0 GB; set a smaller floor, such as --hcache-disk-free-floor 10% (the default is 8GB), or put "
            "--hcache-dirs elsewhere",
        ),
    ],
)
def test_looking_ahead_refuses_a_floor_that_no_file_would_fit_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, way_out: str
) -> None:
    """The user may never have set one."""
    none = tmp_path / "none" / "yet"
    config = replace(small_config(tmp_path), dirs=(none,), free_floor_bytes=8 * 10**9)
    monkeypatch.setattr(SeenDirectory, "file_system_size", lambda _: (1, total))
    with pytest.raises(ConfigError) as refusal:
        look_ahead(config)
    told = f"--hcache-disk-free-floor: 8.0 GB is not allowed; the file system of {none} {way_out}"
    assert str(refusal.value) == told
    if total:
        look_ahead(replace(config, free_floor_bytes=0, free_floor_percent=10.0))


def test_looking_ahead_tells_what_the_file_systems_could_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, 2, floor=1000)
    found = os.statvfs(tmp_path)
    assert look_ahead(config).most_bytes == found.f_blocks * found.f_frsize - 1000
    sizes = {"disk0": (1, 5000), "disk1": (2, 7000)}
    monkeypatch.setattr(SeenDirectory, "file_system_size", lambda self: sizes[self.path.name])
    assert look_ahead(config).most_bytes == 4000 + 6000
    assert look_ahead(replace(config, free_floor_bytes=0, free_floor_percent=10)).most_bytes == 4500 + 6300

    def late(_: SeenDirectory) -> tuple[int, int]:
        raise TimeoutError

    monkeypatch.setattr(SeenDirectory, "file_system_size", late)
    assert look_ahead(config).most_bytes is None


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders that behave as if their file systems were mounted read-only, as far as a start notices."""
    chmod, open_, statvfs = os.chmod, os.open, os.statvfs
    folders: set[Path] = set()

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def read_only_chmod(path: Path, mode: int) -> None:
        refuse(path) if path in folders else chmod(path, mode)

    def read_only_open(path: Path, flags: int, *more: int, dir_fd: int | None = None) -> int:
        place = Path(path).parent if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        if place in folders and flags & (os.O_RDWR | os.O_WRONLY):
            refuse(path)
        return open_(path, flags, *more, dir_fd=dir_fd)

    def read_only_statvfs(path: Path) -> Any:
        found = statvfs(path)
        names = ("f_flag", "f_blocks", "f_frsize", "f_bavail", "f_fsid")
        values = {name: getattr(found, name) for name in names}
        return SimpleNamespace(**{**values, "f_flag": found.f_flag | (os.ST_RDONLY * (path in folders))})

    monkeypatch.setattr("os.chmod", read_only_chmod)
    monkeypatch.setattr("os.open", read_only_open)
    monkeypatch.setattr("os.statvfs", read_only_statvfs)
    return folders


def test_a_new_store_needs_all_directories_to_take_writes(tmp_path: Path, read_only: set[Path]) -> None:
    """By looking ahead as well as by the start."""
    config = small_config(tmp_path, 2)
    config.dirs[1].mkdir()
    read_only.add(config.dirs[1])
    with pytest.raises(StoreFormatError, match=r"cannot write to .*disk1 .*Read-only"):
        look_ahead(config)
    open_fails(config, StoreIOError, "cannot use .*disk1 .*Read-only")


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize(("num_dirs", "stripe"), [(1, 0), (2, 0), (2, 1)])
def test_a_start_serves_what_is_on_a_file_system_that_is_mounted_read_only(
    tmp_path: Path,
    open_store: OpenStore,
    counters: Counters,
    read_only: set[Path],
    num_dirs: int,
    stripe: int,
) -> None:
    config, keys = small_config(tmp_path, num_dirs), make_keys(0, 4)
    store = open_store(config)
    write_keys(store, keys, (4096,) * 4)
    store.close()
    read_only.add(config.dirs[stripe])
    holder = (config.dirs[stripe] / "lock").read_text()
    assert look_ahead(config).holders == {}
    store = open_store(replace(config, user_pid=77))
    expected = ["healthy"] * num_dirs
    expected[stripe] = "read-only"
    assert [item.condition for item in store.stats().directories] == expected
    read_keys(store, keys)
    assert counters["store.runs_lost"] == 0
    assert (config.dirs[stripe] / "lock").read_text() == holder
    open_fails(config, StoreLockedError, "in use by process")
    Inside(store).keeper.round()
    with StoreView.open(config.dirs) as view:
        assert [item.condition for item in view.directories()] == expected
    read_only.clear()
    Inside(store).retry_now()
    Inside(store).keeper.round()
    write_keys(store, make_keys(10, 4), (4096,) * 4)
    read_keys(store, (*keys, *make_keys(10, 4)))


def test_a_directory_of_ours_that_is_closed_to_us_is_opened(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By looking ahead as well as by the start, which gives it mode 0700."""
    config = small_config(tmp_path)
    config.dirs[0].mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)  # of a user who is not root
    assert look_ahead(config).holders == {}
    open_store(config)


def test_looking_ahead_refuses_a_place_where_nothing_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda place, _mode: place != tmp_path)
    with pytest.raises(StoreFormatError, match=r"cannot write to .*none/disk0 \(--hcache-dirs\): .*denied"):
        look_ahead(small_config(tmp_path / "none"))


def test_directories_are_distinct_wherever_links_lead(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for names, problem in ((("a", "link"), "named twice"), (("link/b", "a"), "inside of")):
        with pytest.raises(ConfigError, match=f"^--hcache-dirs: .*{problem}"):
            look_ahead(replace(small_config(tmp_path), dirs=tuple(tmp_path / name for name in names)))


@pytest.mark.parametrize("name", ["circle", "circle/below", "elsewhere"])
def test_a_directory_that_leads_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").symlink_to("circle")
    with pytest.raises(ConfigError, match=r"^--hcache-dirs: a symbolic link of .* to itself"):
        look_ahead(replace(small_config(tmp_path), dirs=(tmp_path / "a", tmp_path / name)))


def test_looking_ahead_refuses_what_is_not_this_store(tmp_path: Path, open_store: OpenStore) -> None:
    """What a start refuses is known before the model is loaded."""
    config = small_config(tmp_path, 2)
    open_store(config).close()
    for dirs in (config.dirs[:1], (*config.dirs, tmp_path / "another")):
        with pytest.raises(StoreFormatError, match="--hcache-dirs: this store has 2 directories"):
            look_ahead(replace(config, dirs=dirs))
    first, second = (path / "superblock.json" for path in config.dirs)
    change_format(first, FORMAT_VERSION + 1)
    with pytest.raises(
        StoreFormatError, match=f"format {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"
    ):
        look_ahead(config)
    first.write_bytes(b"{}")
    look_ahead(config)  # the other one says what the store is
    second.write_bytes(b"{}")
    with pytest.raises(StoreFormatError, match="is damaged"):
        look_ahead(config)


def test_others_are_told_the_process_that_they_can_stop(tmp_path: Path, open_store: OpenStore) -> None:
    config = replace(small_config(tmp_path), user_pid=1)
    open_store(config)
    open_fails(config, StoreLockedError, r"in use by process 1; stop it or .* \(--hcache-dirs\)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_lock_is_taken_all_the_same(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = small_config(tmp_path)
    open_store(config).close()

    def full(*_: object) -> int:
        raise OSError(number, "full")

    monkeypatch.setattr("os.pwrite", full)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), (4096, 4096))
    open_fails(config, StoreLockedError, "in use by process unknown;")


def test_a_longer_number_in_the_lock_does_not_show(tmp_path: Path, open_store: OpenStore) -> None:
    config = replace(small_config(tmp_path), user_pid=12345678)
    open_store(config).close()
    open_store(replace(config, user_pid=9))
    assert (config.dirs[0] / "lock").read_text().split()[0] == "9"
    open_fails(config, StoreLockedError, "in use by process 9\\b")


def test_a_start_on_a_full_disk_that_frees_in_the_background_gives_few_segments_up(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    store = open_store(config)
    runs = [make_keys(20 * number, 20) for number in range(6)]
    for keys in runs:
        write_keys(store, keys, (4096, 4096))
    store.close()
    shows_at: list[float] = []
    real_probe, real_unlink = StoreDirectory.probe, StoreDirectory.unlink_segment

    def probe(self: StoreDirectory) -> None:
        if not shows_at or time.monotonic() < shows_at[0]:
            raise OSError(errno.ENOSPC, "full")
        real_probe(self)

    def unlink(self: StoreDirectory, segment: int) -> None:
        real_unlink(self, segment)
        shows_at.append(time.monotonic() + 0.5)

    monkeypatch.setattr(StoreDirectory, "probe", probe)
    monkeypatch.setattr(StoreDirectory, "unlink_segment", unlink)
    store = open_store(config)
    wait_until(lambda: Inside(store).volumes[0].health.writable)
    kept = [keys for keys in runs if match_keys(store, keys) == 20]
    assert len(runs) - 3 <= len(kept) < len(runs)
    for keys in kept:
        read_keys(store, keys)


def test_a_failed_open_keeps_no_lock(tmp_path: Path, open_store: OpenStore) -> None:
    open_store(small_config(tmp_path / "b"))
    dirs = (tmp_path / "a" / "disk0", tmp_path / "b" / "disk0")
    config = StoreConfig(dirs=dirs, size_bytes=2**24, free_floor_bytes=0, segment_bytes=2**18)
    open_fails(config, StoreLockedError, "in use by")
    open_store(small_config(tmp_path / "a"))


def stored(base: Path, num_dirs: int, open_store: OpenStore) -> StoreConfig:
    config = small_config(base, num_dirs)
    store = open_store(config)
    write_keys(store, make_keys(0, 2), (4096,) * 4)
    store.close()
    return config


def test_the_order_of_directories_does_not_matter(tmp_path: Path, open_store: OpenStore) -> None:
    config = stored(tmp_path, 2, open_store)
    first, second = config.dirs
    swapped = StoreConfig(
        dirs=(second, first), size_bytes=config.size_bytes, free_floor_bytes=0, segment_bytes=2**18
    )
    store = open_store(swapped)
    read_keys(store, make_keys(0, 2))
    write_keys(store, make_keys(10, 2), (4096,) * 4)
    store.close()
    read_keys(open_store(config), (*make_keys(0, 2), *make_keys(10, 2)))


def test_another_number_of_directories(tmp_path: Path, open_store: OpenStore) -> None:
    config = stored(tmp_path, 2, open_store)
    open_fails(
        small_config(tmp_path, 1), StoreFormatError, "--hcache-dirs: .* has 2 directories, but 1 is named"
    )
    open_fails(
        small_config(tmp_path, 3), StoreFormatError, "--hcache-dirs: .* has 2 directories, but 3 are named"
    )
    read_keys(open_store(config), make_keys(0, 2))


def test_directories_of_two_stores(tmp_path: Path, open_store: OpenStore) -> None:
    stored(tmp_path / "a", 2, open_store)
    stored(tmp_path / "b", 2, open_store)
    dirs = (tmp_path / "a" / "disk0", tmp_path / "b" / "disk1")
    config = StoreConfig(dirs=dirs, size_bytes=2**24, free_floor_bytes=0, segment_bytes=2**18)
    open_fails(config, StoreFormatError, "--hcache-dirs: .* directories of different stores")


def change_format(superblock: Path, version: int) -> None:
    superblock.write_text(json.dumps({**json.loads(superblock.read_text()), "format_version": version}))


def test_another_format_version(tmp_path: Path, open_store: OpenStore) -> None:
    config = stored(tmp_path, 1, open_store)
    change_format(config.dirs[0] / "superblock.json", 1)
    open_fails(config, StoreFormatError, f"store format 1, this version reads {FORMAT_VERSION}")


@pytest.mark.parametrize("kind", ["other format", "one more", "two stores", "damaged"])
def test_where_a_refused_start_says_so_a_store_begins_once_all_is_deleted(tmp_path: Path, kind: str) -> None:
    config = small_config(tmp_path, 2)
    DiskStore.open(config, Counters()).close()
    old, wanted = list(config.dirs), config
    first = config.dirs[0] / "superblock.json"
    if kind == "other format":
        change_format(first, FORMAT_VERSION + 1)
    elif kind == "one more":
        wanted = replace(config, dirs=(*config.dirs, tmp_path / "new"))
    elif kind == "two stores":
        other = replace(config, dirs=(tmp_path / "other",))
        DiskStore.open(other, Counters()).close()
        old = [config.dirs[0], *other.dirs]
        wanted = replace(config, dirs=tuple(old))
    else:
        for path in config.dirs:
            (path / "superblock.json").write_text("?")
    for start in (look_ahead, lambda config: DiskStore.open(config, Counters())):
        with pytest.raises(StoreFormatError, match="delete all that is in ") as refusal:
            start(wanted)
    named = "all directories of the store" if kind == "damaged" else ", ".join(map(str, old))
    assert named in str(refusal.value)
    for path in old:
        shutil.rmtree(path)
        path.mkdir()
    DiskStore.open(wanted, Counters()).close()


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"format_version": "1"}'])
def test_a_damaged_superblock(tmp_path: Path, open_store: OpenStore, text: str) -> None:
    config = stored(tmp_path, 1, open_store)
    (config.dirs[0] / "superblock.json").write_text(text)
    open_fails(config, StoreFormatError, r"superblock.json is damaged .*fsck --rebuild")


def test_an_emptied_directory_is_taken_in_again_and_its_chunks_are_misses(
    tmp_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    config = stored(tmp_path, 2, open_store)
    for path in config.dirs[1].iterdir():
        path.unlink()
    store = open_store(config)
    wait_until(lambda: is_healthy(store))
    assert store.stats().chunks == 0
    assert counters["store.runs_lost"] == 1
    write_keys(store, make_keys(0, 2), (4096,) * 4)
    read_keys(store, make_keys(0, 2))
    assert len(list(config.dirs[1].glob("segment-*"))) == 1


@pytest.mark.parametrize("below", ["", "some/folder"])
def test_the_mount_point_of_a_disk_that_is_not_mounted_is_not_written_to(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture, below: str
) -> None:
    """The file system is told by its id; here the superblock remembers another one."""
    point = tmp_path / "point"
    config = replace(small_config(tmp_path, 2), dirs=(tmp_path / "disk0", point / below))
    store = open_store(config)
    write_keys(store, make_keys(0, 2), (4096,) * 4)
    store.close()
    path = config.dirs[0] / "superblock.json"
    block = json.loads(path.read_text())
    path.write_text(json.dumps({**block, "epoch": 9, "file_systems": [block["file_systems"][0], 4711]}))
    point.rename(tmp_path / "away")
    point.mkdir()
    store = open_store(config)
    assert [item.condition for item in store.stats().directories] == ["healthy", "out"]
    wait_until(lambda: "is the disk mounted?" in caplog.text)
    assert match_keys(store, make_keys(0, 2)) == 0
    write_keys(store, make_keys(10, 2), (4096,) * 4)
    read_keys(store, make_keys(10, 2))
    store.close()
    assert not list(point.iterdir())
    assert list(config.dirs[0].glob("segment-*"))


def test_segments_without_a_superblock_at_start_are_left_to_fsck(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the directory is tried again: nobody knows whose they are."""
    config = stored(tmp_path, 2, open_store)
    (config.dirs[1] / "superblock.json").unlink()
    before = sorted(config.dirs[1].glob("segment-*"))
    store = open_store(config)
    time.sleep(10 * config.retry_s)
    assert [item.condition for item in store.stats().directories] == ["healthy", "out"]
    assert "it has no superblock; `hcache store fsck --rebuild` makes a new one" in caplog.text
    assert before
    assert sorted(config.dirs[1].glob("segment-*")) == before
    store.close()
    rebuild(config.dirs)
    read_keys(open_store(config), make_keys(0, 2))


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_half_made_store_is_finished(tmp_path: Path, open_store: OpenStore, is_begun: bool) -> None:
    config = small_config(tmp_path, 2)
    open_store(config).close()
    for path in config.dirs[1].iterdir():
        path.unlink()
    if is_begun:  # a kill while the first superblock was written
        for name in ("lock", "superblock.tmp"):
            (config.dirs[1] / name).touch(0o600)
    store = open_store(config)
    wait_until(lambda: is_healthy(store))
    write_keys(store, make_keys(0, 1), (4096, 4096))
    read_keys(store, make_keys(0, 1))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    config = small_config(Path("/proc/self"))
    open_fails(config, StoreIOError, "--hcache-dirs")


def test_no_o_direct_is_said_once_a_directory(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr("os.open", refuse)
    with caplog.at_level(logging.WARNING):
        store = open_store(small_config(tmp_path, 2))
        for number in range(3):
            write_keys(store, make_keys(4 * number, 2), (5000, 4096))
            read_keys(store, make_keys(4 * number, 2))
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 2


def test_configuration_errors_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="--hcache-dirs"):
        StoreConfig(dirs=(), size_bytes=2**30, free_floor_bytes=0, segment_bytes=2**20)
