"""What SGLang needs in this process."""

from __future__ import annotations

import os
import sys

from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.launch import prepare_launch
from sglang_hcache.core.errors import ConfigError


def restart_with_cpu_runtime() -> None:
    """Start this program again with what SGLang needs on a machine without a GPU.

    Raises:
        ConfigError: the machine has a GPU.
    """
    if has_gpu():
        raise ConfigError("this measures a CPU; on a GPU: benchmarks/gpu/run.py")
    if os.environ.get("SGLANG_USE_CPU_ENGINE"):
        return
    _, environment = prepare_launch([])
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)
