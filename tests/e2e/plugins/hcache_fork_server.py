"""A process that has imported SGLang and forks servers: ``python -m hcache_fork_server FD``, for ``forked_servers.py``.

FD is a socket. A message is JSON with ``arguments``, ``environment`` and ``folder`` of a server, and the descriptor of
its log; the answer is the server's process id. It ends when the other side does.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time

import setproctitle

_PROGRAM = "sglang.launch_server"
_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.torch_native_backend",
)


def main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    from sglang.srt.models.registry import ModelRegistry

    assert ModelRegistry.models
    setproctitle.getproctitle()  # finds the place for titles; it would not once the environment is another
    gc.freeze()  # else the first collection of each server copies all of it
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request, log = _forked(connection)
    _become(log, **request)
    runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)


def _forked(connection):
    """What is asked for, in each server's process."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 1)
        if not message:
            raise SystemExit
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (server := os.fork()) == 0:
                os.close(reading)
                os.close(writing)
                _end_with_next_parent(parent)
                return json.loads(message), descriptors[0]
            os.write(writing, str(server).encode())
            # So that the server becomes a child of the process that asked, which has said it wants it.
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 100))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _end_with_next_parent(parent):
    """Be killed when the process that asked is, too. It is the parent after ``parent``."""
    while os.getppid() == parent:
        time.sleep(0.001)
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise SystemExit("prctl failed")


def _become(log, arguments, environment, folder):
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [_PROGRAM, *arguments]


if __name__ == "__main__":
    main()
