"""A real SGLang server as a child process, for the demo, benchmarks and end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import yaml

from sglang_hcache.cli.server.arguments import values_of
from sglang_hcache.cli.server.launch import prepare_launch
from sglang_hcache.cli.server.ports import LOCAL_HOST, free_port
from sglang_hcache.core.config import SIZE_FIELDS
from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.units import exact_size

_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 25.0  # SGLang gives up on its own health check after 20 s
_STOP_TIMEOUT_S = 45.0
_KILL_TIMEOUT_S = 30.0
_LOG_LINES = 25
_ERROR = re.compile(r"(?:hcache|sglang serve|launch_server\.py): error: (.*)")
"""One line that says it all: ours, or of SGLang's parser below its long list of arguments."""
_EXCEPTION = re.compile(r"^(?:\[.*\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.MULTILINE)
"""The last line of a traceback, also behind what stands in front of each of SGLang's lines."""
_END_GROUP = 'read _ || kill -s KILL -- "-$1"'
"""For a shell: its standard input ends when we do. It asks for SIGKILL to all of the group at once."""
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

Progress = Callable[[float], None]
"""Called with the seconds waited so far."""


class ServerProcessError(HCacheError):
    """The server did not start, or died. The message is what it says the error is, or ends with the end of its log."""


def settings_arguments(file: Path, settings: Mapping[str, Any]) -> list[str]:
    """Write the tier's ``settings`` to ``file``; the server's arguments that name it. Sizes may be numbers."""
    texts = {
        name: exact_size(value) if name in SIZE_FIELDS and isinstance(value, int) else value
        for name, value in settings.items()
    }
    file.write_text(yaml.safe_dump(texts, sort_keys=False), encoding="utf-8")
    return ["--hcache-config", str(file)]


def servers_scratch() -> tempfile.TemporaryDirectory[str]:
    """For ``TMPDIR`` of servers: SGLang, killed, leaves its temporary files. A short name: sockets are among them."""
    return tempfile.TemporaryDirectory(prefix="hcache-")


def with_log_end(problem: str, log: str) -> str:
    """``problem``, the last exception in a server's log, if there is one, and the log's last lines."""
    cause = f": {errors[-1]}" if (errors := _EXCEPTION.findall(log)) else ""
    lines = [f"  | {line}" for line in log.splitlines()[-_LOG_LINES:]]
    return "\n".join([f"{problem}{cause}; its log ends with:", *lines])


class ServerProcess:
    """One server, from ``start`` to ``stop`` or ``kill``; as a context manager it leaves no process behind.

    The server leads a session and process group of its own, so a Ctrl-C in the terminal reaches only us. If we are
    killed, all of the group is too.

    Args:
        args: arguments of ``hcache serve`` without ``--host`` and ``--port``; the tier is on unless
            they say ``--hierarchical-cache off``.
        log: file that receives the server's output; a start appends to it.
        extra_env: added to the environment that the launch has, in place of what is there.
        startup_timeout_s: longest time until the server answers, seconds.
        port: 0 for a free one, another one at every start.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        log: Path,
        extra_env: Mapping[str, str] = _NO_VARIABLES,
        startup_timeout_s: float = 180.0,
        port: int = 0,
    ) -> None:
        self._wanted_port = port
        self._args = tuple(args)
        self._log = Path(log)
        self._extra_env = dict(extra_env)
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._log_start = 0

    # -- what it is ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base address, without a slash at the end; changes with every start, unless a port was given."""
        return f"http://{LOCAL_HOST}:{self._port}"

    @property
    def log(self) -> Path:
        return self._log

    @property
    def pid(self) -> int:
        """Process id of the server's main process, which is also its group's id.

        Raises:
            ServerProcessError: it was never launched.
        """
        if self._process is None:
            raise ServerProcessError("the server has not been launched")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the main process lives."""
        return self._process is not None and self._process.poll() is None

    def require_running(self) -> None:
        """Nothing while the main process lives.

        Raises:
            ServerProcessError: it died; nothing of the server is left then.
        """
        if not self.is_running:
            self._fail("died")

    def log_text(self) -> str:
        """What this server wrote since its last launch."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    # -- start -----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process without waiting for it; :meth:`wait_ready` waits.

        Raises:
            ConfigError: this machine cannot run a server (no GPU and no C compiler).
        """
        assert not self.is_running, "the server is running already"
        self._port = self._wanted_port or free_port()
        command, environment = prepare_launch([*self._args, *self._addresses()])
        environment.update(self._extra_env)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(os.fsencode(f"$ {shlex.join(command)}\n"))
            log.flush()
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = _start_guard(self._process.pid)

    def _addresses(self) -> list[str]:
        # SGLang takes an ephemeral port for its process group and opens it much later, when somebody else may have it.
        chosen = (
            [] if values_of(self._args, "--nccl-port") else ["--nccl-port", str(free_port(but=self._port))]
        )
        return ["--host", LOCAL_HOST, "--port", str(self._port), *chosen]

    def wait_ready(self, progress: Progress | None) -> None:
        """Return when the server answers requests.

        Raises:
            ServerProcessError: it died, or is late; nothing of it is left then.
        """
        began = time.monotonic()
        with httpx.Client(timeout=_HEALTH_TIMEOUT_S, trust_env=False) as client:
            while True:
                waited = time.monotonic() - began
                if not self.is_running:
                    self._fail("died while starting")
                if _is_healthy(client, f"{self.url}/health"):
                    return
                if waited > self._startup_timeout_s:
                    self._fail(f"did not answer within {self._startup_timeout_s:g} s")
                if progress is not None:
                    progress(waited)
                time.sleep(_POLL_S)

    def start(self, progress: Progress | None = None) -> None:
        """Launch and wait until the server answers. May be called again after ``stop`` or ``kill``."""
        self.launch()
        try:
            self.wait_ready(progress)
        except BaseException:
            self.kill()
            raise

    def _fail(self, what: str) -> None:
        assert self._process is not None
        status = self._process.poll()
        self.kill()
        exit_status = "" if status is None else f" (exit status {status})"
        log = self.log_text()
        if told := dict.fromkeys(_ERROR.findall(log)):
            raise ServerProcessError("\n".join(told))
        raise ServerProcessError(with_log_end(f"the server {what}{exit_status}", log))

    # -- end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End gracefully: SIGTERM, 45 seconds to drain and save, then :meth:`kill`. Idempotent."""
        if self._process is None:
            return
        try:
            if self.is_running:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_TIMEOUT_S)
        finally:  # also when a Ctrl-C ends the wait
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole process group at once; returns when all of it is gone. Idempotent.

        Raises:
            ServerProcessError: a process outlived SIGKILL.
        """
        if self._process is None:
            return
        group = self._process.pid
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while members := _members(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServerProcessError(f"processes of group {group} outlive SIGKILL: {members}")
            time.sleep(0.02)
            self._process.poll()
        if self._guard is not None:  # before the group's number is anybody else's
            self._guard.kill()
            self._guard.communicate()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _start_guard(group: int) -> subprocess.Popen[bytes]:
    """A small process that ends the process group ``group`` when we end, also where we are killed.

    The kernel could tell a server itself (``PR_SET_PDEATHSIG``), but when a thread of ours ends, and not its children
    that do not yet ask for the same. In a session of its own it outlives Ctrl-C and a closed terminal.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", _END_GROUP, "sh", str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _members(group: int) -> list[psutil.Process]:
    """Processes of the process group ``group`` that still run."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members
