"""What SGLang needs on a machine without a GPU.

``sgl_kernel`` links against ``libcuda.so.1`` and uses one symbol of it. A stub with that symbol, built
once with the C compiler into the user's cache folder, lets it load where there is no driver.

The ranks of ``--tp-size`` want to be told which cores are theirs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device.compiled import ensure_library

LIBRARY = "libcuda.so.1"
_STUB_NAME = "libcuda-stub"
_CUDA_SUCCESS = 0
_STUB_SOURCE = """\
/* Stands in for the CUDA driver where there is none: every pointer is host memory. */
enum { CUDA_ERROR_NO_DEVICE = 100 };
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    (void)data; (void)attribute; (void)pointer;
    return CUDA_ERROR_NO_DEVICE;
}
"""
# -nostdlib: the source needs no C library, so a compiler without its headers and start files is enough.
_COMPILER_OPTIONS = ("-shared", "-fPIC", "-O2", "-nostdlib", f"-Wl,-soname,{LIBRARY}")


def has_gpu(device_folder: Path = Path("/dev"), driver: str = LIBRARY) -> bool:
    """Whether this machine has an NVIDIA GPU: a device node, or a driver that counts a device.

    A device node with a broken driver counts: SGLang then says what is wrong with it, and nobody is
    served from the CPU by surprise.
    """
    if any(node.name.removeprefix("nvidia").isdigit() for node in device_folder.glob("nvidia[0-9]*")):
        return True
    try:
        cuda = ctypes.CDLL(driver)
        count = ctypes.c_int(0)
        if cuda.cuInit(0) != _CUDA_SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
            return False
    except (OSError, AttributeError):  # no driver; or our own stub, which has neither function
        return False
    return count.value > 0


def ensure_stub() -> Path:
    """The folder with the stub ``libcuda.so.1`` in it, built if it is not there yet or others could have changed it.

    Raises:
        ConfigError: no C compiler, it failed, the cache folder cannot be written, or others could change it.
    """
    try:
        return ensure_library(_STUB_NAME, LIBRARY, _STUB_SOURCE, _COMPILER_OPTIONS)
    except ConfigError as error:
        raise ConfigError(
            f"no GPU here, and serving without one needs a stand-in for {LIBRARY}, which is built once: {error}"
        ) from None


def usable_cores(cpu_folder: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The CPUs that this process may use, one of each physical core as SGLang does it, NUMA node after node."""
    first: dict[str, tuple[int, int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        folder = cpu_folder / f"cpu{cpu}"
        try:
            core = (folder / "topology" / "thread_siblings_list").read_text()
        except OSError:  # some containers hide it
            core = f"{cpu}"
        node = min((int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")), default=0)
        first.setdefault(core, (node, cpu))
    return [cpu for _, cpu in sorted(first.values())]


def variables_of_ranks(num_ranks: int, cores: Sequence[int]) -> dict[str, str]:
    """The environment variable with which the ranks of a server share ``cores``; none for a single rank.

    Without it SGLang does not start more ranks than there are NUMA nodes. It binds their threads only where its
    kernels for a CPU are installed.
    """
    if num_ranks < 2:
        return {}
    if len(cores) < num_ranks:
        shares = [[cores[rank % len(cores)]] for rank in range(num_ranks)]
    else:
        bounds = [rank * len(cores) // num_ranks for rank in range(num_ranks + 1)]
        shares = [list(cores[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}
