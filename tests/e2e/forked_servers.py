"""Servers whose process is forked from one that has imported SGLang: that takes a core 12 s, and tests start many.

The server is a child of the test's process like any other, and leads a session of its own. What differs is that its
modules were imported before plugins were loaded, as in SGLang's own spawned processes. Servers that need another
environment from their first moment on are started the plain way, as are those of benchmarks, demos and commands.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVER = [sys.executable, "-m", "sglang.launch_server"]
_READ_LATER = {
    *("HCACHE_TEST_SWITCHES", "XDG_CACHE_HOME", "PYTEST_CURRENT_TEST"),
    *("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"),
}
"""Variables that nothing reads while SGLang is imported."""
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Makes servers in place of ``subprocess.Popen``; started with the first one, in its environment."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **others: Any) -> Any:
        """As ``ServerProcess`` calls it."""
        early = {name: value for name, value in env.items() if name not in _READ_LATER}
        if self._environment is None and "HCACHE_TEST_FORK" in early:
            self._start(early)
        if list(command[:3]) != _SERVER or early != self._environment:
            return subprocess.Popen(command, env=env, stdout=stdout, **others)
        request = {"arguments": command[3:], "environment": dict(env), "folder": str(Path.cwd())}
        _adopt_orphans(True)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [stdout.fileno()])
            return Forked(int(self._connection.recv(100)))
        finally:
            _adopt_orphans(False)

    def _start(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hcache_fork_server", str(self._theirs.fileno())],
            env=environment,
            pass_fds=[self._theirs.fileno()],
        )
        self._theirs.close()

    def close(self) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.wait()


class Forked:
    """What ``ServerProcess`` uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(_SERVER, timeout or 0.0)
            time.sleep(0.01)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _adopt_orphans(adopts: bool) -> None:
    """Whether processes below this one whose parent ends become its children (prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
