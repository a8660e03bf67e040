"""The kernel's io_uring: whether it may be used, and what of it this process has."""

from __future__ import annotations

import contextlib
import ctypes
import os


def ring_fds() -> set[int]:
    """Descriptors of this process that are io_uring instances."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if "[io_uring]" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


def ring_problem() -> str | None:
    """Whether the kernel lets this process use io_uring. NIXL says so on stderr only, and not why."""
    io_uring_setup = 425  # the same number on all architectures
    parameters = ctypes.create_string_buffer(120)
    fd = ctypes.CDLL(None, use_errno=True).syscall(io_uring_setup, 1, parameters)
    if fd >= 0:
        os.close(fd)
        return None
    return (
        f"io_uring is not allowed here ({os.strerror(ctypes.get_errno())}): "
        "the container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it"
    )
