"""No new store on the disk below a mount point where nothing is mounted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.errors import StoreFormatError, StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig, look_ahead
from sglang_hcache.store.inspect.check import check
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes import mounts
from sglang_hcache.store.volumes.mounts import mount_of
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.testing.stored_chunks import make_keys, read_keys, small_config, write_keys

OpenStore = Callable[..., DiskStore]
KEYS = make_keys(0, 2)
SIZES = (4096, 4096)


@pytest.fixture(autouse=True)
def fstab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is read in place of ``/etc/fstab``."""
    monkeypatch.setattr(mounts, "_LISTED", tmp_path / "fstab")
    return tmp_path / "fstab"


def configured(tmp_path: Path, base: Path, line: str, num_dirs: int = 1) -> StoreConfig:
    """With ``line`` between others in the ``fstab``."""
    (tmp_path / "fstab").write_text(
        f"# made by hand\n\nUUID=0 / ext4 errors=remount-ro 0 1\n{line}\nUUID=9 none swap sw 0 0\n"
        f"UUID=8 {tmp_path}/elsewhere ext4\n"
    )
    return small_config(base, num_dirs)


def open_refused(config: StoreConfig, point: Path) -> None:
    """Before a model is loaded, and then."""
    wanted = f"cannot use {config.dirs[0]} (--hcache-dirs): nothing is mounted at {point}, which {mounts._LISTED} lists"
    with pytest.raises(StoreFormatError) as ahead:
        look_ahead(config)
    assert wanted in str(ahead.value)
    with pytest.raises(StoreIOError) as error:
        DiskStore.open(config, Counters())
    assert wanted in str(error.value)


def test_segments_without_a_superblock_are_refused_before_a_model_is_loaded(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """With the way to save them."""
    config = small_config(tmp_path)
    store = open_store(config)
    write_keys(store, KEYS, SIZES)
    store.close()
    (config.dirs[0] / "superblock.json").unlink()
    for opened in (look_ahead, lambda config: DiskStore.open(config, Counters())):
        with pytest.raises(
            StoreFormatError, match="has segments but no superblock; `hcache store fsck --rebuild`"
        ):
            opened(config)
    assert list(config.dirs[0].glob("segment-*"))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("below", ["", "some/folder"])
def test_no_new_store_where_a_listed_disk_is_missing(tmp_path: Path, is_there: bool, below: str) -> None:
    point = tmp_path / "disk of two words"
    if is_there:
        point.mkdir()
    escaped = str(point).replace(" ", r"\040")
    line = f"UUID=1\t{escaped}/\text4\tdefaults,nofail 0 2"
    open_refused(configured(tmp_path, point / below, line), point)
    assert point.exists() == is_there, "nothing was made"
    assert not is_there or not list(point.iterdir())


def test_no_new_store_behind_a_link_to_a_missing_disk(tmp_path: Path) -> None:
    point, link = tmp_path / "point", tmp_path / "link"
    point.mkdir()
    link.symlink_to(point)
    open_refused(configured(tmp_path, link, f"UUID=1 {point} ext4 nofail"), point)
    assert not list(point.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "# UUID=1 {base} ext4 defaults 0 2",
        "UUID=1 {base} ext4 nofail,noauto 0 2",
        "UUID=1 {base}2 ext4 defaults 0 2",
        "UUID=1 {base}/disk0/below ext4 defaults 0 2",
        "UUID=1 {mounted} ext4 defaults 0 2",
        "nonsense",
    ],
)
def test_all_else_is_as_it_was(tmp_path: Path, open_store: OpenStore, line: str) -> None:
    base, mount = tmp_path / "base", mount_of(tmp_path)
    assert mount is not None
    store = open_store(configured(tmp_path, base, line.format(base=base, mounted=mount.point)))
    write_keys(store, KEYS, SIZES)


def test_a_disk_below_a_mount_point_that_is_not_in_use_is_as_good_as_any(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cloud lists ``/mnt`` for a disk that this machine has not, and somebody mounts one at ``/mnt/nvme0``."""
    point = tmp_path / "mnt"
    config = configured(tmp_path, point / "nvme0" / "hcache", f"UUID=1 {point} auto nofail")
    (tmp_path / "mountinfo").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/root rw\n2 1 8:2 / {point}/nvme0 rw - xfs /dev/nvme0n1 rw\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTED", tmp_path / "mountinfo")
    assert look_ahead(config).holders == {}
    write_keys(open_store(config), KEYS, SIZES)


def test_where_nobody_says_what_is_mounted_nothing_is_refused(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, tmp_path / "point", f"UUID=1 {tmp_path}/point ext4")
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "_MOUNTED", tmp_path / "none")
        assert mount_of(tmp_path) is None
        open_store(config).close()
    write_keys(open_store(config), KEYS, SIZES)  # a store that is there is used


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext4"])
def test_a_directory_in_memory_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    (tmp_path / "mountinfo").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / {tmp_path} rw - {kind} {kind} rw\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTED", tmp_path / "mountinfo")
    config = small_config(tmp_path)
    look_ahead(config)
    expected = f"{config.dirs[0]} (--hcache-dirs) is on {kind}, which is memory"
    assert (expected in caplog.text) == (kind != "ext4")


def test_one_of_two_disks_is_missing(tmp_path: Path, fstab: Path, open_store: OpenStore) -> None:
    """It is left out as ever, and nothing is made on the disk below."""
    point, away = tmp_path / "point", tmp_path / "away"
    config = configured(tmp_path, tmp_path, "")
    # Not tried again: that it is another file system, from which the store keeps off, cannot be shown in one.
    config = replace(config, dirs=(config.dirs[0], point / "disk1"), retry_s=3600.0)
    store = open_store(config)
    write_keys(store, KEYS, SIZES)
    store.close()
    point.rename(away)
    point.mkdir()
    fstab.write_text(f"UUID=1 {point} ext4 nofail 0 2")
    assert look_ahead(config).holders == {}
    store = open_store(config)
    volume = Inside(store).volumes[1]
    assert not volume.health.readable
    assert str(point) in volume.health.reason
    assert not list(point.iterdir())
    store.close()
    point.rmdir()
    away.rename(point)
    read_keys(open_store(config), KEYS)


def test_a_new_store_says_where_it_is(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    config, mount = small_config(tmp_path, 2), mount_of(tmp_path)
    assert mount is not None
    with caplog.at_level(logging.INFO, "sglang_hcache.store"):
        open_store(config).close()
        told = [record.getMessage() for record in caplog.records if "new store" in record.getMessage()]
        caplog.clear()
        open_store(config)
        assert "new store" not in caplog.text
    for line, path in zip(told, config.dirs, strict=True):
        assert line.startswith(
            f"hcache: {path} begins a new store, on {mount.kind} {mount.source}, mounted at {mount.point}, "
        )
        assert line.endswith(" free")


def test_what_lies_above_is_found_by_whole_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        r"23 22 8:2 / /a\040b rw shared:2 master:3 - xfs /dev/one\040two rw",
        r"24 23 8:2 / /a\040b rw - btrfs /dev/top rw",
        "25 22 0:5 / /a rw - autofs systemd-1 rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join([*lines, ""]))
    monkeypatch.setattr(mounts, "_MOUNTED", tmp_path / "mountinfo")
    for path, kind in (("/a b/c", "btrfs"), ("/a b", "btrfs"), ("/a bc", "ext4"), ("/a/x", "autofs")):
        mount = mount_of(Path(path))
        assert mount is not None
        assert mount.kind == kind, path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("rw,relatime shared:1 - ext4 /dev/x rw,errors=remount-ro", False),
        ("ro,relatime shared:1 - ext4 /dev/x rw", True),
        ("rw,relatime - ext4 /dev/x ro", True),
        ("rw,relatime - ext4 /dev/x rw,emergency_ro", True),
        ("rw - ext4 /dev/x rw,errors=remount-ro,shutdown", True),
        ("rw - fuse.none none", False),
    ],
)
def test_a_file_system_that_takes_no_writes_though_statvfs_does_not_tell(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, options: str, expected: bool
) -> None:
    """As ext4 after an error, of a newer Linux."""
    config = small_config(tmp_path, 2)
    open_store(config).close()
    point = config.dirs[1]
    (tmp_path / "mountinfo").write_text(f"1 0 8:1 / / rw - ext4 /dev/y rw\n2 1 8:2 / {point} {options}\n")
    monkeypatch.setattr(mounts, "_MOUNTED", tmp_path / "mountinfo")
    condition = "read-only" if expected else "healthy"
    with StoreView.open(config.dirs) as view:
        assert [item.condition for item in view.directories()] == ["healthy", condition]
        told = [finding.what for finding in check(view) if finding.is_error]
        assert told == [f"{point}: is read-only: its file system is read-only"] * expected
    for path in point.iterdir():
        path.unlink()
    refusal = pytest.raises(StoreFormatError, match=f"cannot write to {point} .*Read-only file system")
    with refusal if expected else nullcontext():
        look_ahead(replace(config, dirs=(point,)))
