"""Small C libraries, built once with this machine's compiler into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_hcache.core.config import chosen_c_compiler, user_cache_dir
from sglang_hcache.core.errors import ConfigError


def library_dir(name: str, source: str, options: Sequence[str]) -> Path:
    """The folder of a library for this processor and this version of its source, built or not."""
    identity = "\0".join((source, *options, platform.machine(), _processor()))
    return user_cache_dir() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def ensure_library(name: str, file_name: str, source: str, options: Sequence[str]) -> Path:
    """The folder with the library ``file_name`` in it, built if it is not there yet.

    Raises:
        ConfigError: no C compiler, it failed, or the cache folder cannot be written.
    """
    folder = library_dir(name, source, options)
    library = folder / file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not library.exists():
            _build(library, source, options)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    return folder


def _build(library: Path, source: str, options: Sequence[str]) -> None:
    compiler = _find_compiler()
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        source_file = Path(scratch) / "source.c"
        built = Path(scratch) / library.name
        source_file.write_text(source)
        command = [*compiler, *options, "-o", str(built), str(source_file)]
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
        f"no C compiler; looked for {looked_for}. Install one, for example: apt-get install gcc"
    )


def _processor() -> str:
    """What the compiler may make use of: a cache folder can be shared by different machines."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return ""
