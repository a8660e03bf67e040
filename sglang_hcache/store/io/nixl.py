"""The engine over NIXL's POSIX plug-in with io_uring: many extents a call, and no thread for each of them.

What NIXL 1.5 does, as measured, and what follows:

* It reports the state of a whole transfer: failed as soon as one extent is short or fails, but not before it has
  cancelled the others and they have ended. Then every operation is done again with system calls, for its own result.
* A transfer that is released while it runs still writes to its buffers, so none is. An agent's requests share
  one ring and one lock: each directory has an agent, used by one thread.
* Registering is bookkeeping by address and by descriptor number, without system calls: all memory is registered
  once and each descriptor number at its first use, also for the files that get this number later.
* There is no call that waits. NIXL's ring becomes readable when something has ended; polling is the fallback.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import importlib.metadata
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, IOResult, OpenFile
from sglang_hcache.store.io.posix import run_op
from sglang_hcache.store.io.rings import ring_fds, ring_problem
from sglang_hcache.store.io.workers import WorkerPool

logger = logging.getLogger(__name__)

OLDEST_NIXL = (1, 5)
"""Older ones take a short read for a complete one, and do nothing any more after a failed one."""

MAX_BUFFERS = 1024
"""Limit of one operation; one with more goes the way of the failed ones. NIXL queues at most ``ios_pool_size``."""

NUM_HELPERS = 4
"""Threads a directory for what NIXL cannot do: syncs and operations of failed transfers."""

FIRST_WAIT_S = 0.001
LONGEST_WAIT_S = 0.05
"""Between looks at running transfers while nothing wakes us, doubling. Not all completions do: one look may collect
the completion of another transfer that was looked at before."""

FIRST_SLEEP_S = 50e-6
"""The same where NIXL's ring was not found, so that nothing wakes us."""


def nixl_problem() -> str | None:
    """Why NIXL cannot be used here, in words for a log line; None if it can."""
    try:
        _bindings()
        version = importlib.metadata.version("nixl")
    except (ImportError, OSError) as error:  # OSError: a library that its wheel needs is missing
        if isinstance(error, ModuleNotFoundError) and error.name == "nixl":
            return "NIXL is not installed (pip install '/path/to/sglang-hcache[nixl]')"
        return f"NIXL cannot be loaded: {error}"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_NIXL:
        return f"NIXL {version} is too old, {'.'.join(map(str, OLDEST_NIXL))} or newer is needed"
    return ring_problem()


class NixlEngine:
    """An ``IOEngine`` over NIXL.

    Args:
        num_stripes: directories.
        depth: operations that each directory's device sees at once.
        on_error: called after an error that nobody foresaw.

    Raises:
        ConfigError: it does not work here; says why.
    """

    name = "nixl"

    def __init__(self, num_stripes: int, depth: int, on_error: Callable[[], object] = lambda: None) -> None:
        problem = nixl_problem()
        if problem is not None:
            raise ConfigError(f"--hcache-io-engine nixl: {problem}; allowed: auto, posix")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        try:
            agents = [_Agent(f"hcache-io{stripe}") for stripe in range(num_stripes)]
        except Exception as error:  # nixlBackendError and others without a common base
            raise ConfigError(
                f"--hcache-io-engine nixl: NIXL's POSIX plug-in does not start: {error}; allowed: auto, posix"
            ) from error
        self._stripes = [_Stripe(stripe, agent, depth, on_error) for stripe, agent in enumerate(agents)]

    def submit(self, batch: Batch, indices: Iterable[int]) -> None:
        groups: dict[tuple[int, IOKind], list[int]] = {}
        for index in indices:
            op = batch.ops[index]
            groups.setdefault((op.stripe, op.kind), []).append(index)
        for (stripe, kind), group in groups.items():
            self._stripes[stripe].submit(batch, kind, group)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for stripe in self._stripes:
            stripe.stop()
        stopped = [stripe.join(max(0.0, deadline - time.monotonic())) for stripe in self._stripes]
        return all(stopped)


class _State(Enum):
    RUNS = "runs"
    DONE = "done"
    FAILED = "failed"


class _Agent:
    """NIXL's side of one directory. Used by one thread at a time."""

    def __init__(self, name: str) -> None:
        nixl = _bindings()
        self._nixl = nixl
        self._name = name
        self._agent = nixl.nixlAgent(name, _agent_config(nixl))
        others = ring_fds()
        # The default pool of 65536 entries takes 12 MiB.
        self._backends = [
            self._agent.createBackend("POSIX", {"use_uring": "true", "ios_pool_size": str(8 * MAX_BUFFERS)})
        ]
        new = ring_fds() - others
        self.ring_fd = new.pop() if len(new) == 1 else None
        """Becomes readable when an extent has ended. None if another thread made a ring meanwhile."""
        self._files: set[int] = set()
        self._register(nixl.DRAM_SEG, (0, 2**64 - 1, 0, ""))

    def prepare(self, kind: IOKind, ops: Sequence[IOOp]) -> int:
        """A transfer of all buffers of ``ops``; nothing moves yet."""
        memory, extents = [], []
        for op in ops:
            fd, offset = op.file.fd, op.offset
            if fd not in self._files:
                self._register(self._nixl.FILE_SEG, (0, 2**62, fd, ""))
                self._files.add(fd)
            for buffer in op.buffers:
                size = buffer.size
                memory.append((buffer.ctypes.data, size, 0))
                extents.append((offset, size, fd))
                offset += size
        nixl = self._nixl
        handle: int = self._agent.createXferReq(
            nixl.NIXL_READ if kind is IOKind.READ else nixl.NIXL_WRITE,
            nixl.nixlXferDList(nixl.DRAM_SEG, memory),
            nixl.nixlXferDList(nixl.FILE_SEG, extents),
            self._name,
            "",
            self._backends,
        )
        return handle

    def post(self, handle: int) -> None:
        """Start a transfer. May move bytes itself, without the GIL: those of a file in the page cache."""
        self._agent.postXferReq(handle)

    def state(self, handle: int) -> _State:
        """Also collects what has ended and submits what is queued, of all transfers."""
        try:
            status = self._agent.getXferStatus(handle)
        except Exception:
            return _State.FAILED
        if status == self._nixl.NIXL_IN_PROG:
            return _State.RUNS
        return _State.DONE if status == self._nixl.NIXL_SUCCESS else _State.FAILED

    def release(self, handle: int) -> None:
        """Forget a transfer that does not run."""
        with contextlib.suppress(Exception):
            self._agent.releaseXferReq(handle)

    def _register(self, memory_type: Any, region: tuple[int, int, int, str]) -> None:
        self._agent.registerMem(self._nixl.nixlRegDList(memory_type, [region]), self._backends)


@dataclass(slots=True)
class _Flight:
    """Operations of one kind that run as one transfer."""

    handle: int
    batch: Batch
    indices: list[int]
    failed: bool = False
    """It was not started properly: whatever its state says, its operations are done again."""


class _Stripe:
    """One directory: its agent, the thread that uses it, and threads for what NIXL cannot do.

    At most ``depth`` operations run, in transfers of a quarter of that: so the device is kept busy while the
    operations of one transfer wait for each other, and a hung device holds on to few buffers.
    """

    def __init__(self, number: int, agent: _Agent, depth: int, on_error: Callable[[], object]) -> None:
        self._agent = agent
        self._on_error = on_error
        self._may_trace = Throttle()
        self._depth = depth
        self._group = max(1, depth // 4)
        self._helpers = WorkerPool(f"hcache-io{number}", NUM_HELPERS, on_error)
        self._jobs: collections.deque[tuple[Batch, IOKind, collections.deque[int]]] = collections.deque()
        self._flights: list[_Flight] = []
        self._num_running = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._broken = False
        # Held like a file: a late wake-up must not go to another file that got its number.
        self._wake = OpenFile(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), direct=False)
        self._events = select.epoll()
        self._events.register(self._wake.fd, select.EPOLLIN)
        if agent.ring_fd is not None:
            self._events.register(agent.ring_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._work, name=f"hcache-nixl{number}", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch, kind: IOKind, indices: Sequence[int]) -> None:
        """Queue operations of one kind."""
        if kind is IOKind.SYNC:
            self._help(batch, indices)
            return
        with self._lock:
            if not self._stopping:
                self._jobs.append((batch, kind, collections.deque(indices)))
                os.eventfd_write(self._wake.fd, 1)
                return
        _refuse(batch, indices, OSError(errno.ESHUTDOWN, "closed"))

    def stop(self) -> None:
        """End the thread behind what was submitted so far."""
        with self._lock:
            self._stopping = True
        os.eventfd_write(self._wake.fd, 1)

    def join(self, timeout_s: float) -> bool:
        """False if it is not idle after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        # The thread may have left work for the helpers, so they stop behind it.
        return self._helpers.close(max(0.0, deadline - time.monotonic())) and not self._thread.is_alive()

    def _work(self) -> None:
        wait_s = 0.0
        while self._flights or self._jobs or not self._stopping:
            try:
                wait_s = self._step(wait_s)
            except Exception:  # our bug; the thread outlives it
                if self._may_trace():
                    logger.exception("hcache: the thread of the NIXL engine stumbled")
                self._on_error()
                time.sleep(LONGEST_WAIT_S)

    def _step(self, wait_s: float) -> float:
        """Start and end what can be, then sleep. Given and returned: how long if nothing wakes us, seconds."""
        self._fill()
        if self._reap():
            return 0.0
        if not self._flights:
            self._sleep(None)
            return 0.0
        wait_s = wait_s or (FIRST_SLEEP_S if self._agent.ring_fd is None else FIRST_WAIT_S)
        return 0.0 if self._sleep(wait_s) else min(2 * wait_s, LONGEST_WAIT_S)

    def _sleep(self, timeout_s: float | None) -> bool:
        """Until woken by a job, an ended extent or the clock; whether it was not the clock."""
        if timeout_s is not None and self._agent.ring_fd is None:
            time.sleep(min(timeout_s, FIRST_WAIT_S))  # epoll counts in milliseconds
            timeout_s = 0
        events = self._events.poll(timeout_s)
        if any(fd == self._wake.fd for fd, _ in events):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake.fd)
        return bool(events)

    def _fill(self) -> None:
        """Start transfers as long as there are operations and room for them."""
        while self._jobs and self._num_running < self._depth:
            batch, kind, waiting = self._jobs[0]
            room = min(self._group, self._depth - self._num_running)
            group: list[int] = []
            while waiting and len(group) < room:
                index = waiting.popleft()
                if self._broken or not 0 < len(batch.ops[index].buffers) <= MAX_BUFFERS:
                    self._help(batch, [index])
                elif batch.begin(index):
                    group.append(index)
            if not waiting:
                self._jobs.popleft()
            if group:
                self._start(batch, kind, group)

    def _start(self, batch: Batch, kind: IOKind, indices: list[int]) -> None:
        try:
            handle = self._agent.prepare(kind, [batch.ops[index] for index in indices])
        except Exception as error:  # nothing was started
            logger.debug("hcache: NIXL refuses a transfer: %s", error)
            self._help(batch, indices, begun=True)
            return
        flight = _Flight(handle, batch, indices)
        self._flights.append(flight)
        self._num_running += len(indices)
        try:
            self._agent.post(handle)
        except Exception as error:
            flight.failed = True
            self._broken = True
            logger.warning("hcache: NIXL cannot start a transfer (%s); using system calls instead", error)

    def _reap(self) -> bool:
        """End what NIXL is done with; whether there was anything."""
        ended = False
        for flight in self._flights.copy():
            state = self._agent.state(flight.handle)
            if state is _State.RUNS:
                continue
            ended = True
            self._flights.remove(flight)
            self._num_running -= len(flight.indices)
            self._agent.release(flight.handle)
            if state is _State.DONE and not flight.failed:
                for index in flight.indices:
                    flight.batch.end(index, IOResult(flight.batch.ops[index].size))
            else:
                self._help(flight.batch, flight.indices, begun=True)
        return ended

    def _help(self, batch: Batch, indices: Sequence[int], *, begun: bool = False) -> None:
        """Have operations done with system calls."""
        for index in indices:
            try:
                self._helpers.submit(functools.partial(_run, batch, index, begun=begun))
            except OSError as error:  # closed, or no thread for it
                _refuse(batch, [index], error, begun=begun)


def _run(batch: Batch, index: int, *, begun: bool) -> None:
    """Do one operation with system calls, unless its batch was given up."""
    if batch.begin(index):
        batch.end(index, run_op(batch.ops[index]))
    elif begun:
        _refuse(batch, [index], OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)), begun=True)


def _refuse(batch: Batch, indices: Iterable[int], error: OSError, *, begun: bool = False) -> None:
    for index in indices:
        if begun or batch.begin(index):
            batch.end(index, IOResult(0, error))


def _bindings() -> Any:
    """NIXL's C++ interface: the Python one above it logs each agent to stdout.

    Raises:
        ImportError: not installed, or not for this version of CUDA.
        OSError: a library is missing.
    """
    show_errors = logging.raiseExceptions
    try:
        from nixl import _bindings
    finally:
        logging.raiseExceptions = show_errors  # NIXL sets it for the whole process
    return _bindings


def _agent_config(nixl: Any) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = False
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    config.captureTelemetry = False
    return config
