"""Terminals whose encoding is not UTF-8, and has neither braille nor ²."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from sglang_hcache.cli import main as command
from sglang_hcache.cli import terminal as terminal_module
from sglang_hcache.cli.demo import chat as demo_chat
from sglang_hcache.cli.terminal import progress
from tests.waiting import wait_until


class Terminal(io.TextIOWrapper):
    """One that refuses what it cannot show."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def written(self) -> str:
        return cast(io.BytesIO, self.buffer).getvalue().decode(self.encoding)


def on_terminal(monkeypatch: pytest.MonkeyPatch, encoding: str) -> Terminal:
    """What standard output and error are from now on. No fixture: pytest would put its own streams back."""
    terminal = Terminal(encoding)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    return terminal


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    terminal = on_terminal(monkeypatch, encoding)
    with progress(Console(stderr=True)) as show:
        show("Measuring")
    assert "Measuring" in terminal.written
    assert terminal.written.isascii() == (encoding == "latin-1")


def test_progress_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(Console(stderr=True)) as show:
        show("Measuring")
        show("Measuring: 1 s")
        monkeypatch.setattr(terminal_module, "_LINE_EVERY_S", 0.0)
        show("Measuring: 2 s")
    assert capsys.readouterr() == ("", "Measuring\nMeasuring: 2 s\n")


def test_progress_in_a_terminal_that_cannot_draw_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, "utf-8")
    monkeypatch.setenv("TERM", "dumb")
    with progress(Console()) as show:
        show("Measuring")
    assert terminal.written == "Measuring\n"


def test_progress_of_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = on_terminal(monkeypatch, "latin-1")

    def is_told(text: str) -> None:
        wait_until(lambda: text in terminal.written)

    class NoServer:
        def start(self, _progress: object) -> None:
            is_told("Starting a server with a random model")
            raise KeyboardInterrupt

        def kill(self) -> None:
            pass

    monkeypatch.setattr(demo_chat, "require_nicegui", lambda: None)
    monkeypatch.setattr(demo_chat, "write_tiny_model", lambda *_: is_told("Writing a random model"))
    monkeypatch.setattr(demo_chat, "_server", lambda *_: NoServer())
    with pytest.raises(KeyboardInterrupt):
        demo_chat.run_chat_demo(keep=tmp_path, host="127.0.0.1", port=0, opens_browser=False)


def test_what_the_terminal_does_not_have_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of measuring ends in a table with µs and R² in it."""
    terminal = on_terminal(monkeypatch, "ascii")
    monkeypatch.setattr(command, "app", lambda: print("5 µs, R² 0.99"))
    command.main()
    assert terminal.written == "5 ?s, R? 0.99\n"


def test_a_path_that_is_not_utf_8_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, "utf-8")
    monkeypatch.setattr(command, "app", lambda: print(os.fsdecode(b"/mnt/\xff in \xc2\xb5s")))
    command.main()
    assert terminal.written == "/mnt/\\udcff in µs\n"
