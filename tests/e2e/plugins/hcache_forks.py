"""Python programs forked from a process that has imported SGLang: that takes a core 12 s, and tests start many.

Such a program is a child of the process that starts it like any other. What differs is that its modules were imported
before it began, as in SGLang's own spawned processes. A program that it starts is forked too: it has a fork server of
its own, forked with it. Started the plain way: what needs another environment from its first moment on, or says so by
having no ``HCACHE_TEST_FORK`` in it.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_READ_LATER = {
    *("HCACHE_TEST_SWITCHES", "HCACHE_TEST_TORCHAO", "XDG_CACHE_HOME", "TMPDIR", "PYTEST_CURRENT_TEST"),
    *("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"),
    *("SGLANG_INIT_NEW_TOKEN_RATIO", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),  # set by what is imported
    "SGLANG_CPU_OMP_THREADS_BIND",  # by the ranks
    "LD_LIBRARY_PATH",  # the same stand-in for libcuda.so.1 in another folder: it is loaded
    "PYTHONPATH",  # but for an SGLang in it
}
"""Variables that nothing reads while SGLang is imported."""
_MARK = "HCACHE_CI_RUN"
"""By which ``.ci/run`` finds what it started: in the title of what is forked, which takes the environment's place."""
_SERVER = ["-m", "sglang.launch_server"]
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Makes processes; the one that they are forked from is started with the first of them.

    Args:
        environment: in which a server starts.
        connection: to the process that they are forked from, if it runs already.
        process: its id.
    """

    def __init__(
        self, environment: Mapping[str, str], connection: socket.socket | None = None, process: int = 0
    ) -> None:
        self._environment = dict(environment)
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()

    def takes(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a program is the same if it is forked; ``arguments`` are those of Python."""
        mine, its = _early(self._environment), _early(environment)
        if "HCACHE_TEST_FORK" not in its or _brings_sglang(environment.get("PYTHONPATH", "")):
            return False
        # A program that is no server does without what a server needs.
        return its == mine if list(arguments[:2]) == _SERVER else its.items() <= mine.items()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The id of a new child of this process; ``request`` is as in ``hcache_fork_server``."""
        with self._lock:
            connection = self._connection or self._started()
            _adopt_orphans(True)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
                return int(connection.recv(100))
            finally:
                _adopt_orphans(False)

    def _started(self) -> socket.socket:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "hcache_fork_server", str(theirs.fileno())]
            if mark := self._environment.get(_MARK):
                command.append(f"{_MARK}={mark}")
            self._process = subprocess.Popen(command, env=self._environment, pass_fds=[theirs.fileno()]).pid
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            os.waitpid(self._process, 0)


def forking_popen(forks: ForkServer) -> type[subprocess.Popen[Any]]:
    """In place of ``subprocess.Popen``."""

    class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, args: Any, *others: Any) -> None:
            # As CPython 3.11 to 3.13 call it; what is left out tests do without.
            _, _, _, passed, folder, given, _, _, shell, *pipes, _, _, _, _, _, leads, _ = others
            environment = dict(os.environ if given is None else given)
            arguments = None if shell or passed else _arguments_of_python(args)
            if arguments is None or not forks.takes(arguments, environment):
                super()._execute_child(args, *others)
                return
            request = {
                "arguments": arguments,
                "environment": environment,
                "leads_session": bool(leads),
                "folder": str(Path.cwd() if folder is None else folder),
            }
            ends = [pipes[0], pipes[3], pipes[5]]
            self.pid = forks.fork(request, [own if end == -1 else end for own, end in enumerate(ends)])
            self._child_created = True
            self._close_pipe_fds(*pipes)

    return ForkingPopen


def _arguments_of_python(command: Any) -> list[str] | None:
    """None: it does not run a file, a module or a text with this Python."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    program, *arguments = map(str, command)
    if program == str(Path(sys.executable).with_name("hcache")):
        return [program, *arguments]
    if arguments[:1] == ["-P"]:
        del arguments[0]  # no module of a server's is in the folder where tests run
    is_plain = (
        program == sys.executable and arguments and (arguments[0] in ("-m", "-c") or arguments[0][0] != "-")
    )
    return arguments if is_plain else None


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _READ_LATER}


def _brings_sglang(python_path: str) -> bool:
    return any((Path(folder) / "sglang").is_dir() for folder in python_path.split(os.pathsep))


def _adopt_orphans(adopts: bool) -> None:
    """Whether processes below this one whose parent ends become its children (prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
