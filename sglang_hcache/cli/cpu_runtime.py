"""What SGLang needs on a machine without a GPU.

``sgl_kernel`` links against ``libcuda.so.1`` and uses one symbol of it. A stub with that symbol, built
once with the C compiler into the user's cache folder, lets it load where there is no driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_hcache.core.config import chosen_c_compiler, user_cache_dir
from sglang_hcache.core.errors import ConfigError

LIBRARY = "libcuda.so.1"
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


def stub_dir() -> Path:
    """The folder of the stub for this machine and this version of its source, built or not."""
    identity = "\0".join((_STUB_SOURCE, *_COMPILER_OPTIONS, platform.machine()))
    return user_cache_dir() / f"libcuda-stub-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def ensure_stub() -> Path:
    """The folder with the stub ``libcuda.so.1`` in it, built if it is not there yet.

    Raises:
        ConfigError: no C compiler, it failed, or the cache folder cannot be written.
    """
    folder = stub_dir()
    library = folder / LIBRARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not library.exists():
            _build(library)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    return folder


def _build(library: Path) -> None:
    compiler = _find_compiler()
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        source = Path(scratch) / "stub.c"
        built = Path(scratch) / LIBRARY
        source.write_text(_STUB_SOURCE)
        command = [*compiler, *_COMPILER_OPTIONS, "-o", str(built), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
            raise ConfigError(f"the C compiler failed ({shlex.join(command)}): {said[0]}")
        built.chmod(0o700)
        os.replace(built, library)  # whole or not at all, also with two servers starting at once


def _find_compiler() -> list[str]:
    chosen = chosen_c_compiler()
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        words = shlex.split(candidate)
        if shutil.which(words[0]):
            return words
    looked_for = f"CC={chosen}" if chosen else "cc, gcc, clang"
    raise ConfigError(
        "no GPU here, and serving without one needs a C compiler to build a stand-in for "
        f"{LIBRARY} once; not found: {looked_for}. Install one, for example: apt-get install gcc"
    )
