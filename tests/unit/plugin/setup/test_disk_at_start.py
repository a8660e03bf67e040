"""A disk tier that cannot be opened: the start ends, or goes on without it and says so."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError, StoreError, StoreFormatError, StoreLockedError
from sglang_hcache.core.layout import Method
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.shapes import NAMED_SHAPES
from sglang_hcache.sglang_plugin.launch import tier_arguments
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.setup.disk_at_start import open_disk, open_late
from sglang_hcache.store import DiskStore
from sglang_hcache.store.io import choice
from sglang_hcache.store.volumes.directory import StoreDirectory


def settings(folder: Path, **more: object) -> HCacheConfig:
    sizes = {"disk_size": "16MiB", "segment_size": "1MiB", "disk_free_floor": 0}
    dirs = f"{folder / 'one'},{folder / 'two'}"
    return HCacheConfig.from_settings({"dirs": dirs, "io_engine": "posix", **sizes, **more})


def opened(config: HCacheConfig) -> DiskStore:
    store, left_out = open_disk(config, 64, Counters(), Alone())
    assert store is not None
    assert left_out is None
    return store


def of_another_format(folder: Path) -> None:
    opened(settings(folder)).close()
    for path in folder.glob("*/superblock.json"):
        path.write_bytes(path.read_bytes().replace(b'"format_version": ', b'"format_version": 9'))


def writable_by_others(folder: Path) -> None:
    (folder / "two").mkdir(mode=0o700)
    (folder / "two").chmod(0o2770)


def with_other_files(folder: Path) -> None:
    (folder / "one").mkdir()
    (folder / "one" / "thesis.tex").touch()


@pytest.mark.parametrize("spoil", [of_another_format, writable_by_others, with_other_files])
def test_what_is_wrong_is_told_before_the_model_is_loaded_and_ends_the_start_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path)
    with pytest.raises(ConfigError):
        tier_arguments._look_ahead(settings(tmp_path), 1)
    with pytest.raises(StoreFormatError):
        open_disk(settings(tmp_path), 64, Counters(), Alone())
    config = settings(tmp_path, disk_at_start="optional")
    with caplog.at_level(logging.WARNING):
        tier_arguments._look_ahead(config, 1)
        store, left_out = open_disk(config, 64, Counters(), Alone())
    assert store is None
    assert left_out is not None
    assert [(item.path, item.condition) for item in left_out.directories] == [
        (path, "out") for path in config.dirs
    ]
    early, late = caplog.messages
    assert "runs without its disk tier (--hcache-disk-at-start optional): " in early
    why = early.partition("optional): ")[2]
    assert late.endswith(why)
    assert left_out.directories[0].reason == f"cannot be opened, and is tried again: {why}"


def test_in_use_by_another_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holder = opened(settings(tmp_path))
    config = settings(tmp_path, disk_at_start="optional")
    tier_arguments._look_ahead(config, 1)
    assert "if it still is when the model is loaded, this server runs without its disk tier" in caplog.text
    assert open_disk(config, 64, Counters(), Alone())[0] is None
    for strict in (settings(tmp_path), settings(tmp_path, disk_at_start="optional", save_profile="/x.json")):
        with pytest.raises(StoreLockedError):
            open_disk(strict, 64, Counters(), Alone())
    holder.close()
    opened(config).close()


def test_engines_are_not_compared_beside_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(choice, "_nixl_wins", lambda *arguments: bool(compared.append(arguments)))
    opened(settings(tmp_path, io_engine="auto")).close()
    assert len(compared) == 1, "at start they are"
    open_late(
        settings(tmp_path, io_engine="auto"), NAMED_SHAPES["llama2-7b"], Counters(), [Method.KV]
    ).close()
    assert len(compared) == 1


def gone(_: object) -> None:
    raise OSError(errno.EIO, "gone")


def late(_: object) -> None:
    raise TimeoutError(errno.ETIMEDOUT, "late")


@pytest.mark.parametrize("method", ["acquire", "segment_sizes", "file_system", "probe"])
@pytest.mark.parametrize("fails", [gone, late])
@pytest.mark.parametrize("is_known", [False, True])
def test_disks_that_fail_while_the_tier_is_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    fails: Callable[[object], None],
    *,
    is_known: bool,
) -> None:
    """Wherever it happens, the error is one that the start knows."""
    if is_known:
        opened(settings(tmp_path)).close()
    monkeypatch.setattr(StoreDirectory, method, fails)
    config = settings(tmp_path, disk_at_start="optional")
    store, left_out = open_disk(config, 64, Counters(), Alone())
    if store is None:
        assert left_out is not None
        with pytest.raises(StoreError):
            open_disk(settings(tmp_path), 64, Counters(), Alone())
    else:
        store.close()
        assert is_known, method


def test_wrong_values_are_refused_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hcache-disk-free-floor"):
        tier_arguments._look_ahead(settings(tmp_path, disk_at_start="optional", disk_free_floor="9999TB"), 1)
    with pytest.raises(ConfigError, match="--hcache-disk-size"):
        open_disk(
            settings(tmp_path, disk_at_start="optional", disk_size="4MB", segment_size="1MiB"), 64, Counters()
        )


def test_a_size_that_no_disk_here_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier_arguments._look_ahead(settings(tmp_path, disk_size="9999TB"), 1)
    assert "--hcache-disk-size: 9999.0 TB is more than" in caplog.text
    assert "--hcache-disk-free-floor is" in caplog.text
    caplog.clear()
    tier_arguments._look_ahead(settings(tmp_path), 1)
    assert not caplog.messages
