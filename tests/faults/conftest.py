"""What the fault suite shares: the store's own fixtures, the seed, and a line or two at the end of the run."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_hcache.store import StoreConfig
from tests.faults.damage import Stores, copy_of, make_stores
from tests.unit.store.conftest import counters, open_store

__all__ = ["counters", "open_store"]


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """``--fault-seed``."""
    return int(pytestconfig.getoption("--fault-seed") or 0)


@pytest.fixture
def flips(pytestconfig: pytest.Config) -> int:
    """``--flips``."""
    return int(pytestconfig.getoption("--flips"))


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Draws that depend on the seed and the test's name."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def memory_path() -> Iterator[Path]:
    """A folder in memory if there is one, for tests that open many stores and do not depend on the device."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and os.access(memory, os.W_OK) and os.statvfs(memory).f_bavail >= 2**14
    with tempfile.TemporaryDirectory(prefix="hcache-faults-", dir=memory if has_room else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def stores(memory_path: Path) -> Stores:
    """Made once; tests take copies."""
    return make_stores(memory_path)


@pytest.fixture
def fresh(memory_path: Path, stores: Stores) -> Callable[[], StoreConfig]:
    """Makes a copy of a store that was closed, in place of the last one."""
    return lambda: copy_of(stores.closed, memory_path / "copy")


@pytest.fixture
def killed(memory_path: Path, stores: Stores) -> Callable[[], StoreConfig]:
    """The same as after a kill."""
    return lambda: copy_of(stores.killed, memory_path / "copy")


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Keeps a line for the end of the run; properties of reports come back from workers too."""
    return lambda line: record_property("note", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, line in getattr(report, "user_properties", ()):
            if name == "note" and report.when == "call":
                terminalreporter.write_line(line)
