"""Commands that start a server of their own on a store that exists leave its sizes as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from sglang_hcache.cli import main as command
from sglang_hcache.cli.profile import run as profile_run
from sglang_hcache.cli.server.kept_sizes import sizes_of_store
from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.paths import rank_dir
from sglang_hcache.sglang_plugin.seam.budget import store_config
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys

OURS = {"disk_size": 100 * 10**9, "disk_free_floor": 10**6, "segment_size": 2**26}


def sizes_in(config: HCacheConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in OURS}


def meant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a server reads them."""
    return sizes_in(HCacheConfig.from_settings({name: settings[name] for name in OURS}))


def made_store(config: StoreConfig) -> tuple[Path, ...]:
    store = DiskStore.open(config, Counters())
    write_keys(store, make_keys(0, 4), (8192,))
    store.close()
    return config.dirs


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, ...]:
    """A store that is larger than servers make by default."""
    return made_store(
        small_config(tmp_path, 2, size=OURS["disk_size"], segment=OURS["segment_size"], floor=10**6)
    )


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``hcache profile`` until it would start a server; the settings that the server would get."""

    def run(*arguments: object) -> HCacheConfig:
        got: list[dict[str, Any]] = []

        def measure(_command: object, settings: dict[str, Any], **_: object) -> None:
            got.append(settings)
            raise ConfigError("enough")

        monkeypatch.setattr(profile_run, "measure", measure)
        monkeypatch.setattr("sys.argv", ["hcache", "profile", "--model-path", "m", *map(str, arguments)])
        with pytest.raises(SystemExit):
            command.main()
        assert got, capsys.readouterr().err
        return HCacheConfig.from_settings(got[0])

    return run


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_store_keeps_its_sizes_while_it_is_profiled(profiled: Any, dirs: tuple[Path, ...]) -> None:
    config = profiled("--hcache-dirs", ",".join(map(str, reversed(dirs))))
    assert sizes_in(config) == OURS
    opened = store_config(config)
    assert opened is not None
    store = DiskStore.open(opened, Counters())
    assert store.stats().chunks == 4
    store.close()
    assert meant(sizes_of_store(dirs)) == OURS


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_a_store_of_ranks_keeps_the_sizes_of_all(missing: int | None, profiled: Any, tmp_path: Path) -> None:
    """Also where one of its disks is not there."""
    dirs = [tmp_path / "a", tmp_path / "b"]
    for rank in range(2):
        part = small_config(
            tmp_path, size=OURS["disk_size"] // 2, segment=OURS["segment_size"] // 2, floor=10**6
        )
        made_store(replace(part, dirs=tuple(rank_dir(path, rank, 2) for path in dirs)))
    if missing is not None:
        rmtree(dirs[missing])
    assert meant(sizes_of_store(dirs)) == OURS
    config = profiled("--hcache-dirs", ",".join(map(str, dirs)), "--tp-size", "2")
    assert sizes_in(config) == OURS


def test_a_floor_that_is_a_share_is_kept_as_one(tmp_path: Path) -> None:
    config = HCacheConfig(dirs=(tmp_path,), disk_free_floor="0.5%", disk_size=2**26, io_engine="posix")
    settings = store_config(HCacheConfig.model_validate(json.loads(config.model_dump_json())))
    assert settings is not None
    assert settings.floor_of(10**6) == 5000
    assert settings.floor_text == "0.5%"
    kept = HCacheConfig.from_settings(sizes_of_store(made_store(settings)))
    assert store_config(kept.model_copy(update={"dirs": (tmp_path,)})).floor_of(10**6) == 5000


def test_sizes_that_are_given_win(profiled: Any, dirs: tuple[Path, ...], tmp_path: Path) -> None:
    given = ("--hcache-dirs", ",".join(map(str, dirs)))
    config = profiled(*given, "--hcache-disk-size", "64MiB")
    assert (config.disk_size, config.segment_size) == (2**26, None)
    assert config.disk_free_floor == OURS["disk_free_floor"]
    (tmp_path / "server.yaml").write_text("disk_free_floor: 3GB\nsegment_size: 8MiB\n")
    config = profiled(*given, "--hcache-config", tmp_path / "server.yaml")
    assert (config.disk_size, config.disk_free_floor) == (OURS["disk_size"], 3 * 10**9)
    assert config.segment_size == 2**23


def test_without_a_store_nothing_is_kept(profiled: Any, dirs: tuple[Path, ...], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for others in (
        (),
        (tmp_path / "none",),
        (tmp_path / "empty",),
        dirs[:1],
    ):  # the last: a server refuses it
        assert sizes_of_store(others) == {}
    config = profiled("--hcache-dirs", tmp_path / "none")
    assert config.disk_size == HCacheConfig().disk_size
    assert not (tmp_path / "none").exists()
