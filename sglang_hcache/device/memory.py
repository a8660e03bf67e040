"""Large, page-aligned host buffers."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang_hcache.core.config import flag_of
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.units import format_bytes

HostMemory: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]
"""Makes host buffers of so many bytes: page-aligned, zeroed, uint8, 1-D."""

logger = logging.getLogger(__name__)

_CGROUP, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_WORTH_HUGE_PAGES = 4 * 2**20
_MOST_COMMITTING = 8


def host_buffer(num_bytes: int) -> npt.NDArray[np.uint8]:
    """``num_bytes`` of zeroed, page-aligned host memory, uint8, 1-D. Pages are committed when first touched.

    Alignment lets the disk tier read and write it with O_DIRECT. Core dumps leave it out: it is large, and what is in
    it is as private as prompts.
    """
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_DONTDUMP)
    if num_bytes >= _WORTH_HUGE_PAGES:
        # One page fault for 2 MiB, not 512; a kernel without huge pages says no, and nothing is lost.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8, count=num_bytes)


class PinnedMemory:
    """Host buffers that a GPU copies from and to by itself, beside what else it does.

    Registered with the driver where they are, as long as somebody uses them: torch's own allocator of pinned memory
    would round a large buffer up to a power of two.

    Args:
        register: takes an address and a size; returns what went wrong, or None.
        unregister: takes an address.
    """

    def __init__(
        self,
        register: Callable[[int, int], str | None] | None = None,
        unregister: Callable[[int], object] | None = None,
    ) -> None:
        self._register = register_with_cuda if register is None else register
        self._unregister = unregister_with_cuda if unregister is None else unregister

    def __call__(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A :data:`HostMemory`.

        Raises:
            ConfigError: there is not so much, or it cannot be pinned.
        """
        available = available_host_bytes()
        # Pinning takes all pages at once, and a cgroup's limit would end the server without a word.
        problem = f"{format_bytes(available)} available" if num_bytes > available else None
        if problem is None:
            buffer = host_buffer(num_bytes)
            _commit(buffer)
            problem = self._register(buffer.ctypes.data, buffer.nbytes)
        if problem is not None:
            raise ConfigError(
                f"{flag_of('host_size')}: {format_bytes(num_bytes)} of it cannot be pinned ({problem}); lower it, or "
                "raise the limit of locked memory (ulimit -l) or of the container"
            )
        # Never unmapped while the driver knows it. When the process ends, so does what the driver knows of it.
        weakref.finalize(buffer, self._unregister, buffer.ctypes.data).atexit = False
        return buffer


def _commit(buffer: npt.NDArray[np.uint8]) -> None:
    """Touch all pages, on several cores: the driver does it on one, and took 7 s for 8 GiB on a virtual machine."""
    parts = np.array_split(buffer[:: mmap.PAGESIZE], min(_MOST_COMMITTING, os.cpu_count() or 1))
    with ThreadPoolExecutor(len(parts)) as threads:
        list(threads.map(_zero, parts))


def _zero(part: npt.NDArray[np.uint8]) -> None:
    part[:] = 0  # numpy lets the interpreter go meanwhile


def register_with_cuda(address: int, num_bytes: int) -> str | None:
    """Pin memory with ``cudaHostRegister``; what went wrong, or None."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, num_bytes, 0)
    return None if int(error) == 0 else str(runtime.cudaGetErrorString(error))


def unregister_with_cuda(address: int) -> None:
    """Undo :func:`register_with_cuda`."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def available_host_bytes() -> int:
    """Host memory that this process may still take: the system's available memory, cut to the limits of its cgroups.

    The page cache counts as available: the kernel gives it up when memory is asked for.
    """
    available = _meminfo("MemAvailable")
    for group in _own_cgroups():
        limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _clean_file_bytes(group)))
    return available


def tell_limits() -> None:
    """Log the limit of memory that :func:`available_host_bytes` goes by, and one that it does not know."""
    limits = {
        group: limit for group in _own_cgroups() if (limit := _read_number(group / "memory.max")) is not None
    }
    if limits:
        group = min(limits, key=lambda item: limits[item])
        logger.info(
            "hcache: host memory is limited to %s (%s)", format_bytes(limits[group]), group / "memory.max"
        )
    for group in _own_cgroups("memory"):
        old = _read_number(group / "memory.limit_in_bytes")
        if old is not None and old < _meminfo("MemTotal"):
            logger.warning(
                "hcache: host memory is limited to %s by %s (cgroup v1), which the tier does not know: only limits of "
                "cgroup v2 are. Keep --hcache-host-size and what SGLang takes below it, or the kernel kills the server",
                format_bytes(old), group / "memory.limit_in_bytes",
            )  # fmt: skip
            break


def _own_cgroups(controller: str = "") -> list[Path]:
    """Folders of cgroups, from this process's own to the outermost that can be seen: mostly a container's only.

    Args:
        controller: of cgroup v1; empty: of cgroup v2.
    """
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    own = next((path for _, names, path in named if controller in names.split(",")), "").removeprefix("/")
    root = _CGROUP / controller
    return [root / own, *(parent for parent in (root / own).parents if parent.is_relative_to(root))]


def _clean_file_bytes(group: Path) -> int:
    """Bytes of a cgroup's pages of files that are on disk as well."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = {name: int(size) for name, _, size in (line.partition(" ") for line in lines)}
    kept = sizes.get("file_dirty", 0) + sizes.get("file_writeback", 0)
    return max(0, sizes.get("inactive_file", 0) + sizes.get("active_file", 0) - kept)


def _meminfo(field: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return None
