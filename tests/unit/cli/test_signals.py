"""Commands that get signals while they run and while they clean up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from sglang_hcache.cli import entry, main
from sglang_hcache.cli.demo import run as demo
from sglang_hcache.cli.demo.run import DemoSettings, run_demo
from sglang_hcache.cli.demo.view import TextView
from sglang_hcache.cli.server.pair import launch_together
from sglang_hcache.cli.server.process import ServerProcess
from sglang_hcache.cli.signals import terminated_as_interrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


ENTRY = """
import signal, sys, time
from sglang_hcache.cli.entry import main

class Slow:
    def find_spec(self, name, *_):
        if name == "sglang_hcache.cli.main":
            print(signal.getsignal(signal.SIGINT).name, flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
main()
"""


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_ctrl_c_while_modules_are_imported_is_silent(handler: signal.Handlers) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{handler.name}\n"
        if handler is signal.SIG_DFL:
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()


def test_a_command_gets_ctrl_c_as_python_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(main, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    entry.main()
    assert seen == [signal.default_int_handler]


def test_ctrl_c_while_a_server_is_silent_ends_a_command_without_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", "from sglang_hcache.cli.entry import main; main()", "top", "--url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1) == b"G"
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 130
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """A test run in the background of a script inherits that signals are ignored."""
    old = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", NUMBERS)
def test_only_the_first_signal_interrupts_and_the_handlers_come_back(first: signal.Signals) -> None:
    steps = []

    def work() -> None:
        with terminated_as_interrupted():
            try:
                send(first)
                steps.append("not reached")
            finally:
                send(*NUMBERS)
                steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["cleaned up"]
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.default_int_handler] * 3


def test_clean_up_is_not_interrupted_by_the_first_signal_either() -> None:
    with terminated_as_interrupted() as interruptions:
        interruptions.ignore()
        send(*NUMBERS)


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminated_as_interrupted():
        send(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class Server:
    """Stands for ``ServerProcess``: the signal ``number`` comes whenever one is killed."""

    url = "http://127.0.0.1:1"

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.is_killed = False

    def launch(self) -> None:
        pass

    def wait_ready(self, _progress: object) -> None:
        send(self.number)

    def kill(self) -> None:
        send(self.number)
        self.is_killed = True


@pytest.mark.parametrize("number", NUMBERS)
def test_a_demo_that_gets_signal_after_signal_kills_both_servers_and_removes_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    servers = (Server(number), Server(number))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "write_tiny_model", lambda *_: None)
    monkeypatch.setattr(demo, "_prompt_lengths", lambda *_: [100])
    monkeypatch.setattr(demo, "_servers", lambda *_: servers)
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoSettings(), TextView(Console()))
    assert [server.is_killed for server in servers] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_kills_every_server_although_one_cannot_be_killed() -> None:
    class Stubborn(Server):
        def launch(self) -> None:
            raise OSError

        def kill(self) -> None:
            raise KeyboardInterrupt

    servers: list[Any] = [Stubborn(signal.SIGINT), Server(signal.SIGTERM)]
    with terminated_as_interrupted() as interruptions:
        interruptions.ignore()
        with pytest.raises(KeyboardInterrupt):
            launch_together(cast(list[ServerProcess], servers))
    assert servers[1].is_killed
