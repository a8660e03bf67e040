"""Which engine to use: the one that is asked for, or the one that reads faster from this disk."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sglang_hcache.core.config import IOEngineName
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.nixl import NixlEngine, nixl_problem
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.store.io.rate import probe_bytes, read_rates
from sglang_hcache.store.io.workers import DeadlineCaller

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
"""For everything, the opening and the removal of the file as well."""

LEAD = 1.05
"""NIXL must be faster by this factor to be chosen."""


NIXL_DEPTH = 64
"""Operations at once in each directory with NIXL, where they cost no threads. Enough to keep a device busy until our
thread gets its turn: while another one computes in Python, that takes 5 ms."""

BUSY_S, FREE_S = 0.004, 0.001
"""How long the neighbour in the comparison keeps and leaves the interpreter."""


def choose_engine(
    name: IOEngineName,
    directories: Sequence[Path],
    direct: Sequence[bool],
    spare_bytes: Callable[[], int],
    on_error: Callable[[], object] = lambda: None,
) -> IOEngine:
    """The engine ``name``, for ``directories``.

    ``auto`` reads a small file in the first directory with both, beside a thread that keeps the interpreter busy as
    the scheduler of a loaded server does, and takes the faster one. It logs one line.

    Args:
        direct: whether files in each directory are opened with O_DIRECT.
        spare_bytes: how large the file may be, asked if there is to be one; below 4 MiB ``posix`` is taken.
        on_error: called after an error of the engine's threads that nobody foresaw.

    Raises:
        ConfigError: ``nixl`` is asked for and does not work here.
    """
    is_auto = name == IOEngineName.AUTO
    if name == IOEngineName.NIXL or (is_auto and _nixl_wins(directories[0], direct[0], spare_bytes)):
        return NixlEngine(len(directories), NIXL_DEPTH, on_error)
    return PosixEngine(len(directories), on_error=on_error)


def _nixl_wins(directory: Path, direct: bool, spare_bytes: Callable[[], int]) -> bool:
    problem = nixl_problem()
    if problem is not None:
        logger.info("hcache: %s; using the posix engine", problem)
        return False
    size = probe_bytes(spare_bytes())
    if not size:
        logger.info("hcache: no room to compare I/O engines; using the posix engine")
        return False
    caller = DeadlineCaller("hcache-probe")
    try:
        posix, nixl = caller.call(lambda: _compare(directory, direct, size), PROBE_TIMEOUT_S)
    except Exception as error:  # whatever it is, the server starts: posix needs nothing that can be missing
        logger.warning("hcache: comparing I/O engines failed (%s); using the posix engine", error)
        return False
    finally:
        caller.close(0.0)
    wins = nixl > LEAD * posix
    logger.info(
        "hcache: using the %s engine; in %s, beside a busy thread, posix reads %.0f MB/s and nixl %.0f MB/s",
        *("nixl" if wins else "posix", directory, posix / 1e6, nixl / 1e6),
    )
    return wins


def _compare(directory: Path, direct: bool, size: int) -> list[float]:
    """Bytes a second of posix and NIXL. Raises OSError, or ConfigError if NIXL does not start."""
    with contextlib.ExitStack() as stack:
        engines: list[IOEngine] = [PosixEngine(1), NixlEngine(1, NIXL_DEPTH)]
        for engine in engines:
            stack.callback(engine.close, 0.0)
        stack.enter_context(_busy_neighbour())
        return read_rates(engines, directory, direct, size)


@contextlib.contextmanager
def _busy_neighbour() -> Iterator[None]:
    """A thread that computes in Python for as long as the block runs, whose end waits for it."""
    stop = threading.Event()
    thread = threading.Thread(target=_compute, args=(stop,), name="hcache-probe-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _compute(stop: threading.Event) -> None:
    given_up = time.monotonic() + PROBE_TIMEOUT_S  # by who waits for the comparison, which may hang for good
    while not stop.wait(FREE_S) and time.monotonic() < given_up:
        begun = time.monotonic()
        while time.monotonic() - begun < BUSY_S:
            pass
