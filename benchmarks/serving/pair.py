"""A server with the tier and one without it, otherwise alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.progress import Progress

from common.model import load_arguments
from common.terminal import while_doing
from common.turns import in_turn
from serving.servers import arguments_without_tier, device_arguments, restored
from sglang_hcache.cli.server.pair import launch_together
from sglang_hcache.cli.server.process import ServerProcess, settings_arguments

OFF, TIER = "off", "tier"
Pair = Mapping[str, ServerProcess]
"""The two servers as ``OFF`` and ``TIER``."""
_STARTUP_TIMEOUT_S = 400.0


def make_pair(
    folder: Path,
    model: Path,
    *,
    dtype: str,
    pool_tokens: int,
    host_bytes: int,
    has_disk: bool,
    method: str,
    tier_arguments: Sequence[str],
    logs: Path,
) -> Pair:
    """Two servers that are not started yet; configuration and the disk tier, if any, are in ``folder``.

    Args:
        tier_arguments: more of them, of the server with the tier.
    """
    settings: dict[str, object] = {"host_size": host_bytes, "method": method, "restore": restored(method)}
    if has_disk:
        settings |= {"dirs": [str(folder / "disk")], "disk_size": "16GB", "disk_free_floor": "256MiB"}
    common = [
        *("--model-path", str(model), "--dtype", dtype, "--incremental-streaming-output"),
        *(
            "--max-total-tokens",
            str(pool_tokens),
            "--sleep-on-idle",
            *device_arguments(),
            *load_arguments(model),
        ),
    ]
    own = {
        OFF: arguments_without_tier(),
        TIER: [*settings_arguments(folder / "hcache.yaml", settings), *tier_arguments],
    }
    return {
        name: ServerProcess(
            [*common, *args],
            log=logs / f"{name}.log",
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        )
        for name, args in own.items()
    }


@contextmanager
def running(pair: Pair, progress: Progress, *, together: bool) -> Iterator[dict[str, float] | None]:
    """Both are up, and neither is left at the end.

    Args:
        together: both are started at once, which is not for a tier that measures this machine when it starts.

    Yields:
        Seconds that each took to start: the second one beside the first, which is idle. None: together.

    Raises:
        ConfigError, ServerProcessError: one did not start.
    """
    try:
        with while_doing(progress, "starting servers"):
            if together:
                launch_together(list(pair.values()))
            seconds = None if together else {name: _start(server) for name, server in pair.items()}
        yield seconds
    finally:
        for server in pair.values():
            server.kill()


def start_alone(pair: Pair, number: int) -> dict[str, float]:
    """Seconds from launching to serving, each server with nothing else running.

    Args:
        number: of the round: says who starts first.

    Raises:
        ConfigError, ServerProcessError: one did not start.
    """
    seconds = {}
    for name in in_turn(pair, number):
        server = pair[name]
        try:
            seconds[name] = _start(server)
        finally:
            server.kill()
    return seconds


def unique_bytes(pair: Pair) -> dict[str, int]:
    """Memory that belongs to each server's processes alone."""
    return {name: _unique_bytes(psutil.Process(server.pid)) for name, server in pair.items()}


def host_memory_bytes(server: ServerProcess) -> int:
    """What is resident of the tier's host memory where that is not pinned: pages that nobody used yet are not there.

    Its buffers alone are both kept out of core dumps (``dd``) and given huge pages (``hg``); small ones are missed.
    """
    main = psutil.Process(server.pid)
    found = 0
    for process in (main, *main.children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
            name, *values = line.split()
            if name == "Rss:":
                resident = 1024 * int(values[0])
            elif name == "VmFlags:" and {"dd", "hg"} <= set(values):
                found += resident
    return found


def _start(server: ServerProcess) -> float:
    began = time.monotonic()
    launch_together([server])
    return time.monotonic() - began


def _unique_bytes(main: psutil.Process) -> int:
    return sum(process.memory_full_info().uss for process in (main, *main.children(recursive=True)))
