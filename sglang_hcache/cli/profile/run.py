"""A server that is started only to measure."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_hcache.cli.server.process import (
    ServerProcess,
    ServerProcessError,
    servers_scratch,
    settings_arguments,
)
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.terminal import redraws, spinner_for
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.profile import Profile

_STARTUP_TIMEOUT_S = 3600.0  # large models take their time, and who waits sees the seconds
_LINE_EVERY_S = 30.0
_WARNING = "hcache: reads from the disk tier could not be measured"


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it."""

    profile: Profile
    seconds: float
    """From the command to the stopped server."""
    troubles: tuple[str, ...]
    """What the server said that the user should know, although there is a profile."""


def measure(arguments: Sequence[str], settings: Mapping[str, Any]) -> Measured:
    """Start a server with ``arguments`` and ``settings``, let it measure, stop it; nothing of it stays.

    Says on standard error how far it is.

    Raises:
        ServerProcessError: it did not get as far as a profile. Says what its log ends with.
        ConfigError: this machine cannot run a server.
    """
    began = time.monotonic()
    with (
        terminated_as_interrupted() as interruptions,
        tempfile.TemporaryDirectory(prefix="hcache-profile-") as folder,
        servers_scratch() as scratch,
    ):
        file = Path(folder) / "profile.json"
        own = settings_arguments(Path(folder) / "hcache.yaml", {**settings, "save_profile": str(file)})
        server = ServerProcess(
            [*arguments, *own],
            log=Path(folder) / "server.log",
            extra_env={"TMPDIR": scratch},
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        )
        troubles: list[str] = []
        with _progress() as show:
            try:
                server.start(
                    lambda waited: show(f"Starting SGLang, loading the model, measuring: {waited:.0f} s")
                )
            except ServerProcessError as error:
                if not file.exists():
                    raise
                # Measuring comes before the rest of a start, which may fail for reasons of its own.
                troubles = [f"after measuring, the server did not start: {error}"]
            else:
                show("Stopping the server")
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


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what it is given beside a spinner; in a file or a pipe as a line, once in a while."""
    console = Console(stderr=True)
    if redraws(console):
        with console.status("Starting SGLang", spinner=spinner_for(console)) as status:
            yield status.update
        return
    told_at = time.monotonic()

    def tell(text: str) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _LINE_EVERY_S:
            told_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield tell


def _read(file: Path) -> Profile:
    try:
        return Profile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the server saved no profile that we can read: {error}") from None
