"""The ``hcache`` command as a user types it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sglang_hcache
from sglang_hcache.cli import main as command
from sglang_hcache.cli.server import launch
from sglang_hcache.core.config import FILE_ONLY_FIELDS, HCacheConfig, flag_of
from sglang_hcache.core.errors import ConfigError


def run(monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["hcache", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        command.main()
    return exit_info.value.code


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"hcache {sglang_hcache.__version__}\n"


def test_serve_help_names_every_flag(monkeypatch, capsys):
    assert run(monkeypatch, "serve", "--help") == 0
    shown = capsys.readouterr().out
    for field in HCacheConfig.model_fields.keys() - FILE_ONLY_FIELDS:
        assert flag_of(field) in shown
        assert HCacheConfig.model_fields[field].description
    assert "--hierarchical-cache" in shown
    assert "--hcache-config" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-path", "m", "--port", "1", "-tp", "2"],
        ["--model-path=m", "--no-such-flag", "-x", "word", "--version"],
        ["--config", "server.yaml"],
        ["-h"],
    ],
)
def test_serve_passes_everything_on_in_order(monkeypatch, arguments):
    seen = []
    monkeypatch.setattr(launch, "become_server", seen.append)
    assert run(monkeypatch, "serve", *arguments) == 0
    assert seen == [arguments]


def test_our_errors_are_lines_and_status_2(monkeypatch, capsys):
    def refuse(arguments):
        raise ConfigError("first\nsecond")

    monkeypatch.setattr(launch, "become_server", refuse)
    assert run(monkeypatch, "serve", "--model", "m") == 2
    assert capsys.readouterr().err == "hcache: error: first\nhcache: error: second\n"


@pytest.mark.parametrize(
    "arguments", [["--port", "1"], ["m"], ["--modelpath", "m"], ["--model-impl", "auto"]]
)
def test_serve_says_that_it_needs_a_model(monkeypatch, capsys, arguments):
    monkeypatch.setattr(launch, "become_server", pytest.fail)
    assert run(monkeypatch, "serve", *arguments) == 2
    assert capsys.readouterr().err.startswith("hcache: error: --model-path is missing")


def test_ctrl_c_outside_of_a_command_is_status_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "app", interrupted)
    assert run(monkeypatch, "plan") == 130
    assert capsys.readouterr() == ("", "")


def test_the_command_line_starts_without_what_takes_long_to_import():
    heavy = ("numpy", "matplotlib", "torch", "transformers", "tokenizers", "sglang", "nicegui")
    code = f"import sys, sglang_hcache.cli.main\nprint([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("[]\n", "")
