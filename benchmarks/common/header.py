"""What one must know to believe a benchmark's numbers. No names of machines or users."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.store.volumes.mounts import mount_of


def make_header(benchmark: str) -> dict[str, Any]:
    """Name, date (ISO 8601, to the second), commit, machine and versions."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def commit() -> str | None:
    """Of this repository, with ``-dirty`` where files differ from it; None outside of one, or without git."""
    try:
        git = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return git.stdout.strip() or None


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel and whether there is a GPU."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "gpu": has_gpu(),
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "sglang-hcache", "torch")},
    }


def file_system_of(folder: Path) -> str | None:
    """Its type, such as ``ext4``; None if it cannot be told."""
    mount = mount_of(folder)
    return None if mount is None else mount.kind


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
