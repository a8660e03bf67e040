"""Paths that people give, with ``~`` in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.main import app
from sglang_hcache.cli.paths import given_path
from sglang_hcache.core.errors import ConfigError, HCacheError

NOBODYS = "~nobody-has-this-name/x"


def test_a_path_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/usr")
    assert given_path("DIR", "~/d") == tmp_path / "d"
    assert given_path("DIR", "share") == Path("/usr/share")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("DIR", ["store", "stat", NOBODYS]),
        ("MODEL", ["plan", NOBODYS, "--io-gbps", "1", "--tflops", "1"]),
        ("DIR", ["tiny-model", NOBODYS]),
        ("--keep", ["demo", "--keep", NOBODYS]),
        ("--out", ["profile", "--model-path", "x", "--out", NOBODYS]),
        ("--config", ["store", "stat", "--config", NOBODYS]),
    ],
)
def test_a_home_that_nobody_has_is_named(name: str, command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, HCacheError), result
    assert str(result.exception).startswith(f"{name}: ")
    assert "nobody knows this home directory" in str(result.exception)
    with pytest.raises(ConfigError, match=name):
        given_path(name, NOBODYS)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("DIR", ["tiny-model", ""]),
        ("--keep", ["demo", "--keep", ""]),
        ("--out", ["profile", "--model-path", "x", "--out", ""]),
        ("--config", ["store", "stat", "--config", ""]),
        ("--profile", ["plan", "--profile", ""]),
        ("--png", ["plan", "llama2-7b", "--io-gbps", "1", "--tflops", "1", "--png", ""]),
    ],
)
def test_an_empty_name_is_not_the_current_folder(name: str, command: list[str]) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 2
    assert name in result.output
    assert "the name is empty" in result.output
