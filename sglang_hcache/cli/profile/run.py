"""A server that is started only to measure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
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
from sglang_hcache.cli.terminal import progress
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.profile import Profile

_STARTUP_TIMEOUT_S = 3600.0  # large models take their time, and who waits sees the seconds
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
        with progress(Console(stderr=True)) as show:
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
                show("Measured: stopping the server")
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


def _read(file: Path) -> Profile:
    try:
        return Profile.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the server saved no profile that we can read: {error}") from None
