"""A process that has imported SGLang and forks others: ``python -m hcache_fork_server FD``, for ``hcache_forks.py``.

FD is a socket. A message is JSON with Python's ``arguments``, ``environment`` and ``folder`` of a program and whether
it ``leads_session``, and the descriptors of its standard input, output and errors; the answer is its process id. It
ends when the other side does. Arguments behind FD are for whoever reads its title.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types

import setproctitle
import sitecustomize
from hcache_forks import ForkServer, forking_popen

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.torch_native_backend",
)
_SERVER = "sglang.launch_server"


def main() -> None:
    environment = dict(os.environ)
    inherited = set(environment.get("PYTHONPATH", "").split(os.pathsep))
    libraries = [folder for folder in sys.path[1:] if folder not in inherited]
    for name in _IMPORTED:
        importlib.import_module(name)
    from sglang.srt.models.registry import ModelRegistry

    assert ModelRegistry.models
    _search_sglang_only()
    setproctitle.getproctitle()  # finds the place for titles; it would not once the environment is another
    gc.freeze()  # else the first collection of each program copies all of it
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        arguments = _become(*_forked(connection), libraries)
        if arguments[:2] == ["-m", _SERVER]:
            _run(arguments)
            return
        # What it starts is forked from here, in a process that is forked before it has threads.
        ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = os.getpid()
        if process := os.fork():
            break
        ours.close()
        _end_with(own)
    connection.close()
    forks = ForkServer(environment, ours, process)
    subprocess.Popen = forking_popen(forks)
    status = _status_of(arguments)
    forks.close()
    # What Python does beyond this at an end takes a second with so many modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _search_sglang_only():
    """Who imported a function that is hooked: SGLang goes through all nine thousand modules, for each of them."""
    from sglang.srt.plugins import hook_registry

    def propagate(original, wrapped, source):
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.") and module is not source:
                for attribute in [key for key, value in vars(module).items() if value is original]:
                    setattr(module, attribute, wrapped)

    hook_registry._propagate_patch = propagate


def _forked(connection):
    """What is asked for, in each program's process."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (program := os.fork()) == 0:
                for descriptor in (reading, writing, connection.detach()):
                    os.close(descriptor)
                while os.getppid() == parent:
                    time.sleep(0.001)
                _end_with(os.getppid())
                return json.loads(message), descriptors
            os.write(writing, str(program).encode())
            # So that the program becomes a child of the process that asked, which has said it wants it.
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 100))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _end_with(parent):
    """Be killed when ``parent`` is, too."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise SystemExit("prctl failed")
    if os.getppid() != parent:
        raise SystemExit("the process that asked for this one has ended")


def _become(request, descriptors, libraries):
    """Python's arguments; all else that a program finds is as it would be."""
    if request["leads_session"]:
        os.setsid()
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["folder"])
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    if "HCACHE_TEST_TORCHAO" in environment:
        sitecustomize.UNUSED.discard("torchao")
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = request["arguments"]
    first = "" if arguments[0] in ("-m", "-c") else os.path.dirname(os.path.realpath(arguments[0]))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *libraries]
    return arguments


def _status_of(arguments):
    """Run it; its exit status."""
    try:
        _run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(arguments):
    first, *others = arguments
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(others[0], vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
