"""A server that is started only to measure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from sglang_hcache.cli.server.process import ServerProcess, ServerProcessError, settings_arguments
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.terminal import spinner_for
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.profile import Profile

_STARTUP_TIMEOUT_S = 3600.0  # large models take their time, and who waits sees the seconds
_STAGES = (
    ("KV Cache is allocated", "Measuring"),
    ("Load weight begin", "Loading the model"),
    ("", "Starting SGLang"),
)
"""What SGLang 0.5.17 logs first -> what goes on then; the latest first. Only shown: nothing depends on it."""
_WARNING = "hcache: reads from the disk tier could not be measured"


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it."""

    profile: Profile
    seconds: float
    """From the command to the stopped server."""
    troubles: tuple[str, ...]
    """What the server said that the user should know, although there is a profile."""


def measure(arguments: Sequence[str], settings: Mapping[str, Any], *, shows_progress: bool) -> Measured:
    """Start a server with ``arguments`` and ``settings``, let it measure, stop it; nothing of it stays.

    Raises:
        ServerProcessError: it did not get as far as a profile. Says what its log ends with.
        ConfigError: this machine cannot run a server.
    """
    began = time.monotonic()
    with (
        terminated_as_interrupted() as interruptions,
        tempfile.TemporaryDirectory(prefix="hcache-profile-") as folder,
    ):
        file = Path(folder) / "profile.json"
        own = settings_arguments(Path(folder) / "hcache.yaml", {**settings, "save_profile": str(file)})
        server = ServerProcess(
            [*arguments, *own],
            log=Path(folder) / "server.log",
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        )
        troubles: list[str] = []
        with _progress(server, file, is_shown=shows_progress) as status:
            try:
                server.start(status.waited)
            except ServerProcessError as error:
                if not file.exists():
                    raise
                # Measuring comes before the rest of a start, which may fail for reasons of its own.
                troubles = [f"after measuring, the server did not start: {error}"]
            else:
                status.show("Stopping the server")
                troubles = [
                    line[line.index("hcache: ") + len("hcache: ") :]
                    for line in server.log_text().splitlines()
                    if _WARNING in line
                ]
                server.stop()
            finally:
                interruptions.ignore()
                server.kill()
        return Measured(_read(file), time.monotonic() - began, tuple(troubles))


class _Stages:
    """Tells a spinner how far a server is; None: nobody looks."""

    def __init__(self, server: ServerProcess, file: Path, status: Status | None) -> None:
        self._server = server
        self._file = file
        self._status = status
        self._stage = ""
        self._since_s = 0.0

    def waited(self, seconds: float) -> None:
        """``seconds`` since the server was launched."""
        if self._status is None:
            return
        log = self._server.log_text()
        stage = next(text for marker, text in _STAGES if marker in log)
        if self._file.exists():
            stage = "Measured; waiting until the server can be stopped"
        if stage != self._stage:
            self._stage, self._since_s = stage, seconds
        self.show(f"{stage}: {seconds - self._since_s:.0f} s")

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)


@contextmanager
def _progress(server: ServerProcess, file: Path, *, is_shown: bool) -> Iterator[_Stages]:
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield _Stages(server, file, None)
        return
    with console.status("Starting SGLang", spinner=spinner_for(console)) as status:
        yield _Stages(server, file, status)


def _read(file: Path) -> Profile:
    try:
        return Profile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the server saved no profile that we can read: {error}") from None
