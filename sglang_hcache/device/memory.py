"""Large, page-aligned host buffers."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_WORTH_HUGE_PAGES = 4 * 2**20


def host_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """``num_bytes`` of zeroed, page-aligned host memory, uint8, 1-D. Pages are committed when first touched.

    Alignment lets the disk tier read and write it with O_DIRECT.
    """
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _WORTH_HUGE_PAGES:
        # One page fault for 2 MiB, not 512; a kernel without huge pages says no, and nothing is lost.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8, count=num_bytes)


def available_host_bytes() -> int:
    """Host memory that this process may still take: the system's available memory, cut to the cgroup's limit."""
    available = _meminfo("MemAvailable")
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo(field: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return None
