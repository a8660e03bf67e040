"""``hcache chat`` before its page: options, ports, a missing NiceGUI."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.chat import command
from sglang_hcache.cli.chat.session import AnswerOptions
from sglang_hcache.cli.logbooks import starters
from sglang_hcache.cli.main import app
from sglang_hcache.core.errors import ConfigError


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def serve_page(url: str, **fields: Any) -> None:
        seen.update(fields, url=url)

    monkeypatch.setattr(command, "serve_page", serve_page)
    result = CliRunner().invoke(app, ["chat", *arguments])
    assert result.exit_code == 0, result.output
    return seen


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(monkeypatch)
    assert (seen["url"], seen["host"], seen["port"]) == ("http://127.0.0.1:30000", "127.0.0.1", 8088)
    assert seen["options"] == AnswerOptions()
    assert not seen["opens_browser"]


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(
        monkeypatch, "--url", "gpu7:30000", "--port", "9", "--max-tokens", "5", "--temperature", "0", "--system", "s",
        "--open", "--allow-host", "a.b", "--allow-host", "c",
    )  # fmt: skip
    assert (seen["url"], seen["port"]) == ("http://gpu7:30000", 9)
    assert seen["options"] == AnswerOptions(max_tokens=5, temperature=0.0, system="s")
    assert seen["opens_browser"]
    assert seen["allowed"] == ["a.b", "c"]


@pytest.mark.parametrize("temperature", ["1e999", "inf"])
def test_a_temperature_is_a_number(monkeypatch: pytest.MonkeyPatch, temperature: str) -> None:
    monkeypatch.setattr(command, "serve_page", pytest.fail)
    result = CliRunner().invoke(app, ["chat", "--temperature", temperature])
    assert isinstance(result.exception, ConfigError)
    assert "--temperature" in str(result.exception)


@pytest.mark.parametrize("command_line", [["chat", "--port", "0"], ["top", "--once"]])
def test_a_key_that_cannot_be_sent_is_refused_and_not_told(command_line: list[str]) -> None:
    result = CliRunner().invoke(app, command_line, env={"HCACHE_API_KEY": "s3cret\r"})
    assert isinstance(result.exception, ConfigError)
    assert "HCACHE_API_KEY" in str(result.exception)
    assert "s3cret" not in str(result.exception) + result.output


@pytest.mark.parametrize(
    ("host", "allowed", "names"),
    [
        ("127.0.0.1", (), ("localhost", "127.0.0.1", "[::1]")),
        ("localhost", (), ("localhost", "127.0.0.1", "[::1]")),
        ("::1", (), ("localhost", "127.0.0.1", "[::1]")),
        ("127.0.0.2", ("a.b",), ("localhost", "127.0.0.1", "[::1]", "127.0.0.2", "a.b")),
        ("0.0.0.0", (), ()),
        ("0.0.0.0", ("*.a.b",), ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "*.a.b")),
        ("fd00::1", ("[fd00::2]",), ("localhost", "127.0.0.1", "[::1]", "[fd00::1]", "[fd00::2]")),
    ],
)
def test_names_of_the_page(host: str, allowed: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert command.host_names(host, allowed) == names


@pytest.mark.parametrize("name", ["http://a.b", "a.b:80", "*", "a*", "a.*", "", "a b", "::1"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--allow-host"):
        command.host_names("127.0.0.1", ["a.b", name])


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: {port} is in use on 127.0.0.1"):
            command.usable_port("127.0.0.1", port)
    assert command.usable_port("127.0.0.1", port) == port
    assert command.usable_port("127.0.0.1", 0) > 0


def test_a_host_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="--host"):
        command.usable_port("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="--host: 'no such host'"):
        command.usable_port("no such host", 0)
    for name in ("a..b", "a" * 70, "\udc80"):
        with pytest.raises(ConfigError, match=r"--host: .* is not an address"):
            command.usable_port(name, 0)


def test_without_nicegui_the_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['nicegui'] = None\n"
        "sys.argv = ['hcache', 'chat', '--port', '0']\n"
        "from sglang_hcache.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert 'pip install "/path/to/sglang-hcache[chat]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_only_the_page_needs_the_extra() -> None:
    folder = Path(command.__file__).parent
    modules = [
        f"sglang_hcache.cli.chat.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['nicegui'] = sys.modules['markdown_it'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_starters_are_worth_keeping() -> None:
    found = starters()
    assert found == starters()
    assert len({starter.name for starter in found}) == len(found)
    assert all(len(starter.text.split()) > 200 for starter in found)
