from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig, environment_with, profile_dir, user_cache_dir
from sglang_hcache.core.errors import ConfigError


def test_defaults_write_nothing_to_disk() -> None:
    config = HCacheConfig.from_settings({})
    assert config.dirs == ()


def test_parts_that_do_not_fit_into_their_whole_are_refused() -> None:
    assert HCacheConfig.from_settings({"disk_size": "100MB"}).segment_bytes == 12_500_000
    for settings, parts in (
        ({"host_size": "100MB", "staging_size": "51MB"}, ("staging_size", "50.0 MB", "--hcache-host-size")),
        ({"disk_size": "100MB", "segment_size": "26MB"}, ("segment_size", "25.0 MB", "--hcache-disk-size")),
    ):
        with pytest.raises(ConfigError) as error:
            HCacheConfig.from_settings(settings)
        for part in parts:
            assert part in str(error.value)


def test_a_large_store_has_no_more_than_about_a_thousand_segments() -> None:
    def segment(disk_size: str) -> int:
        return HCacheConfig.from_settings({"disk_size": disk_size}).segment_bytes

    assert [segment(size) for size in ("64GB", "256GiB", "1TiB", "32TiB", "64TiB")] == [
        *(256 * 2**20, 256 * 2**20, 2**30, 2**35, 2**35)
    ]


def test_text_as_on_the_command_line() -> None:
    config = HCacheConfig.from_settings({"dirs": "/a, /b", "disk_size": "8GB", "host_size": "512MiB"})
    assert config.dirs == (Path("/a"), Path("/b"))
    assert (config.disk_size, config.host_size) == (8 * 10**9, 512 * 2**20)


def test_it_survives_the_way_through_json() -> None:
    settings = {
        "dirs": ["/a"], "write_policy": "write_through", "host_size": "1GB", "disk_max_age": "1.5d",
        "disk_free_floor": "7B", "disk_write_budget": "999KB",
    }  # fmt: skip
    config = HCacheConfig.from_settings(settings)
    assert config.disk_max_age == 36 * 3600
    assert HCacheConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"host_size": "8x"}, ("--hcache-host-size", "'8x'", "GiB")),
        (
            {"write_policy": "sometimes"},
            ("--hcache-write-policy", "'sometimes'", "write_back", "write_through"),
        ),
        ({"method": "token"}, ("--hcache-method", "'token'", "auto", "hidden", "kv")),
        ({"io_engine": "uring"}, ("--hcache-io-engine", "'uring'", "nixl", "posix")),
        ({"dirs": "/a,/a"}, ("--hcache-dirs", "twice")),
        ({"measure_s": 61}, ("measure_s", "61 is not allowed; it must be less than or equal to 60")),
        ({"measure_s": True}, ("measure_s", "True", "number")),
        ({"disk_size": True}, ("--hcache-disk-size", "True", "number")),
        ({"disk_size": "9" * 400}, ("--hcache-disk-size", "8 EiB")),
        ({"dirs": None}, ("--hcache-dirs", "None", "separated by commas")),
        ({"dirs": 5}, ("--hcache-dirs", "5", "separated by commas")),
        ({"dirs": ["/a", None]}, ("--hcache-dirs", "None", "a list of them")),
        ({"dirs": {"/a": 1}}, ("--hcache-dirs", "/a", "a list of them")),
        ({"dirs": "~nobody-of-this-name/a"}, ("--hcache-dirs", "~nobody", "from / on")),
        ({"profile": "~nobody-of-this-name/a"}, ("--hcache-profile", "~nobody", "from / on")),
        ({"disk_max_age": 30}, ("--hcache-disk-max-age", "30 is not a time", "12h or 30d")),
        ({"disk_size": "20G"}, ("--hcache-disk-size: '20G' is not a size; write",)),
        (
            {"disk_free_floor": "10"},
            (
                "--hcache-disk-free-floor: '10' is 10 bytes; write its unit, such as 10GB, or a share such as 10%",
            ),
        ),
        (
            {"disk_write_budget": "4"},
            ("--hcache-disk-write-budget: '4' is 4 bytes; write its unit, such as 4GB",),
        ),
        ({"host_size": 4}, ("--hcache-host-size: 4 is 4 bytes; write its unit, such as 4GB",)),
        ({"staging_size": 500}, ("staging_size (in the file of --hcache-config): 500 is 500 bytes;",)),
        ({"disk_free_floor": "ten%"}, ("--hcache-disk-free-floor", "'ten%' is not allowed", "such as 10%")),
        ({"disk_szie": 2}, ("unknown setting 'disk_szie'", "did you mean disk_size?")),
        ({"--hcache-disk-size": 2}, ("unknown setting '--hcache-disk-size'", "did you mean disk_size?")),
        ({"disk_max_age": "0d"}, ("--hcache-disk-max-age", "'0d' is not a time between a second and 36500d")),
        ({"disk_sise": "1GB"}, ("disk_sise", "disk_size")),
    ],
)
def test_errors_name_flag_value_and_what_is_allowed(
    settings: dict[str, object], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        HCacheConfig.from_settings(settings)
    for part in parts:
        assert part in str(error.value)


SECONDS_AND_SHARES = [name for name, field in HCacheConfig.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize("field", SECONDS_AND_SHARES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "inf", True, False, 1e12, None])
def test_a_number_is_one_that_the_scheduler_can_wait_for(field: str, value: object) -> None:
    """JSON has no infinity, so it died there; and no thread can wait for 1e12 seconds."""
    with pytest.raises(ConfigError, match=f"^{field} .* is not allowed; "):
        HCacheConfig.from_settings({field: value})


@pytest.mark.parametrize("dirs", ["", ",", "/a,,", " ", [""]])
def test_an_empty_name_is_a_variable_that_is_not_set(dirs: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^--hcache-dirs: .* one of the names is empty; leave the flag out"
    ):
        HCacheConfig.from_settings({"dirs": dirs})
    assert HCacheConfig.from_settings({"dirs": []}).dirs == ()


def test_directories_are_distinct() -> None:
    for dirs, problem in ((["/a", "/b/../a"], "named twice"), (["/a", "/a/b"], "inside of")):
        with pytest.raises(ConfigError, match=problem):
            HCacheConfig.from_settings({"dirs": dirs})


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        HCacheConfig.from_settings({"host_size": "x", "disk_size": "y"})
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "/stub"), ("/lib", "/stub:/lib"), ("/stub:/lib", "/stub:/lib"), ("/lib:/stub", "/stub:/lib")],
)
def test_a_path_comes_first_and_others_stay(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", before)
    assert environment_with({"LD_LIBRARY_PATH": "/stub"})["LD_LIBRARY_PATH"] == after
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert environment_with({"LD_LIBRARY_PATH": "/stub"})["LD_LIBRARY_PATH"] == "/stub"


def test_a_user_without_a_home_directory_is_told_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"no home directory .* set XDG_CACHE_HOME to a folder"):
        user_cache_dir()
    with pytest.raises(ConfigError, match="no home directory"):
        profile_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "sglang-hcache"
