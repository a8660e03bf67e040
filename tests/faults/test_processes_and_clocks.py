"""Two processes at once, children that outlive their parent, and clocks that jump."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from sglang_hcache.core.errors import StoreLockedError, StoreTimeoutError, WriteBudgetError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.testing.io_faults import HangingEngine
from sglang_hcache.testing.stored_chunks import make_keys, read_keys, small_config, write_keys
from tests.faults.damage import HANG_S, in_time
from tests.faults.traffic import Habits, Traffic, Watch, over_cap
from tests.unit.store.conftest import wait_until

OpenStore = Callable[..., DiskStore]
MIB = 2**20
LAYERS = (8192, 5000, 8192)
KEYS = make_keys(0, 4)
DAY_S = 24 * 3600.0


# -- two processes -----------------------------------------------------------------------------------


def open_on_command(commands: Connection) -> None:
    """For each configuration that comes: open, say how it went; use and close it when told to."""
    with suppress(EOFError):
        while True:
            config = commands.recv()
            try:
                store = DiskStore.open(config, Counters())
            except StoreLockedError as error:
                commands.send(("locked", str(error)))
                continue
            except BaseException:
                commands.send(("broken", traceback.format_exc()))
                continue
            commands.send(("opened", ""))
            commands.recv()
            write_keys(store, KEYS, LAYERS)
            read_keys(store, KEYS)
            store.close()
            commands.send(("closed", ""))


def test_of_two_processes_one_gets_the_store(tmp_path: Path, chance: random.Random) -> None:
    """The other one is told who has it; also where they name the directories in another order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=open_on_command, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        for turn in range(16):
            base = tmp_path / str(turn // 4)  # made anew now and then
            config = small_config(base, chance.randint(1, 3) if turn % 4 == 0 else len(os.listdir(base)))
            both = [config, replace(config, dirs=config.dirs[::-1])]
            chance.shuffle(both)
            compete([ours for ours, _ in pipes], both, [process.pid for process in processes])
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()
        for process in processes:
            process.kill()
            process.join(HANG_S)


def compete(pipes: list[Connection], configs: list[StoreConfig], pids: list[int | None]) -> None:
    for pipe, config in zip(pipes, configs, strict=True):
        pipe.send(config)
    answers = [answer_of(pipe) for pipe in pipes]
    assert sorted(kind for kind, _ in answers) == ["locked", "opened"], answers
    winner = [kind for kind, _ in answers].index("opened")
    assert f"in use by process {pids[winner]};" in answers[1 - winner][1]
    pipes[winner].send("go on")
    assert answer_of(pipes[winner]) == ("closed", "")


def answer_of(pipe: Connection) -> tuple[str, str]:
    assert pipe.poll(HANG_S), "a process hangs"
    kind, text = pipe.recv()
    return kind, text


PARENT = """
import subprocess, sys
from pathlib import Path
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore
from sglang_hcache.testing.stored_chunks import make_keys, small_config, write_keys
store = DiskStore.open(small_config(Path(sys.argv[1]), 2), Counters())
write_keys(store, make_keys(0, 4), (8192, 5000, 8192))
lease = store.lease(make_keys(0, 4))
store.read_layers(lease, {0: __import__("numpy").zeros(4 * 8192, "uint8")})
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_that_outlives_the_server_does_not_keep_the_store(tmp_path: Path) -> None:
    """It inherits every descriptor that is not closed on exec."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(HANG_S)
        os.kill(child, 0)  # it lives
        assert not [name for name in open_files(child) if name.startswith(str(tmp_path))]
        store = DiskStore.open(small_config(tmp_path, 2), Counters())
        read_keys(store, KEYS)
        store.close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_every_file_of_the_store_is_closed_on_exec(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(small_config(tmp_path, 2))
    write_keys(store, KEYS, LAYERS)
    with store.lease(KEYS) as lease:
        for layer, size in enumerate(LAYERS):
            store.read_layers(lease, {layer: np.zeros(4 * size, np.uint8)})
        ours = {fd: name for fd, name in open_fds().items() if name.startswith(str(tmp_path))}
        names = {Path(name).name for name in ours.values()}
        assert names >= {"lock", "segment-00000000.seg"}
        assert [
            name for fd, name in ours.items() if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        ] == []


def open_files(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]


def open_fds() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


# -- clocks ------------------------------------------------------------------------------------------


class Clock:
    """The wall clock, set forward and back."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


def spend_all(store: DiskStore) -> int:
    """Write until the budget is used up; returns runs written."""
    for number in range(1000):
        try:
            write_keys(store, make_keys(10 * number, 4), LAYERS)
        except WriteBudgetError:
            return number
    raise AssertionError("the budget does not end")


def admits(store: DiskStore) -> bool:
    """Whether nearly half of the budget is left: a quarter, besides what is kept for chunks that are used again."""
    return store.admits(4, (MIB // 4,), reused=False)


def test_the_write_budget_with_a_clock_that_jumps(
    tmp_path: Path, open_store: OpenStore, clock: Clock
) -> None:
    """By a day or less, nothing is given away; by more, what was written before counts again when it is set right."""
    budget = 4 * MIB
    config = replace(small_config(tmp_path), write_budget_bytes=budget)
    store = open_store(config)
    runs = spend_all(store)
    assert 30 < runs < 60
    for jump in (-DAY_S, 12 * 3600.0, 36 * 3600.0, -DAY_S):
        clock.now_s += jump
        assert 0.9 * budget < store.stats().written_today_bytes <= budget
        assert not admits(store)
        assert spend_all(store) <= 1
    store.close()
    store = open_store(config)
    assert not admits(store)
    for jump in (2 * DAY_S, -1e9):
        clock.now_s += jump
        assert store.stats().written_today_bytes == 0
        assert spend_all(store) == runs
        clock.now_s -= jump
        assert not admits(store)
    clock.now_s -= 2 * DAY_S
    assert admits(store)


def test_a_wall_clock_that_is_wild_changes_no_deadline(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, chance: random.Random
) -> None:
    """What hangs is given up in time, and a directory that was out is taken in again."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + chance.uniform(-10, 10) * DAY_S)
    engine = HangingEngine(PosixEngine(2, 2), lambda op: False)
    config = replace(small_config(tmp_path, 2), io_timeout_s=0.5)
    store = open_store(config, engine)
    with Traffic(store, Habits(seed="0", num_threads=2, num_keys=60)) as traffic:
        for turn in range(3):
            written = traffic.counts["written"]
            wait_until(lambda written=written: traffic.counts["written"] > written + 5, HANG_S)
            engine.hangs = lambda op: op.kind is IOKind.READ
            late = f"read {StoreTimeoutError.__name__}"
            wait_until(lambda late=late, turn=turn: traffic.counts[late] > turn, HANG_S)
            engine.let_go()
            wait_until(lambda: {item.condition for item in store.stats().directories} == {"healthy"}, HANG_S)
    in_time(store.close)


def test_a_wall_clock_that_is_wild_lets_chunks_go_and_no_more(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, chance: random.Random
) -> None:
    """Before or after their time; what is served is right, and the cap holds."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + chance.uniform(-10, 10) * DAY_S)
    config = replace(small_config(tmp_path, 2), max_age_s=10 * DAY_S)
    for _ in range(2):
        store = open_store(config)
        with Watch(partial(over_cap, config)), Traffic(store, Habits("0", 2, num_keys=60)) as traffic:
            wait_until(lambda store=store: store.stats().totals.get("segments_expired", 0) > 20, HANG_S)
            wait_until(lambda traffic=traffic: traffic.counts["read"] > 20, HANG_S)
        in_time(store.close)
        assert not [count for count in traffic.counts if "Corrupt" in count]
