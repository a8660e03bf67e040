"""Small C libraries, built once with this machine's compiler into the user's cache folder."""

from __future__ import annotations

import grp
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sglang_hcache.core.config import chosen_c_compiler, user_cache_dir
from sglang_hcache.core.errors import ConfigError

_SCRATCH = "build-"
_NOT_LOADED = (_SCRATCH, ".")
"""Names that no loader looks for: of those who build now, and of files in use on a network drive (``.nfs…``)."""


def library_dir(name: str, source: str, options: Sequence[str]) -> Path:
    """The folder of a library for this processor and this version of its source, built or not."""
    identity = "\0".join((source, *options, platform.machine(), _processor()))
    return user_cache_dir() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def ensure_library(name: str, file_name: str, source: str, options: Sequence[str]) -> Path:
    """The folder with the library ``file_name`` in it, built if it is not there yet or others could have changed it.

    Raises:
        ConfigError: no C compiler, it failed, the cache folder cannot be written, or others could change it.
    """
    folder = library_dir(name, source, options)
    library = folder / file_name
    with suppress(ConfigError):
        return _folder_of_ours(library)
    try:
        for parent in reversed(folder.parents):
            parent.mkdir(0o755, exist_ok=True)  # not for a group to write, whatever the umask is
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
        _build(library, source, options)  # not taking one that is there: others may have put it there
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or folder}: {error.strerror}; XDG_CACHE_HOME can name another folder"
        ) from None
    return _folder_of_ours(library)


def _folder_of_ours(library: Path) -> Path:
    """The folder of ``library``, without links, if it is there alone and only this user and root can change it.

    Root may have built it for everybody, and it may be mounted read-only. The folder becomes part of a server's search
    path: whoever writes there, or puts another one in its place, runs code in servers.

    Raises:
        ConfigError: it is not so.
    """
    try:
        folder = library.parent.resolve(strict=True)
        file = folder / library.name
        if not (stat.S_ISREG(file.lstat().st_mode) and os.access(file, os.R_OK)):
            raise ConfigError(f"cannot read {file}: remove it")
        shared = [path for path in (file, folder) if not _is_ours_alone(path.lstat())]
        shared += [path for path in folder.parents if not _is_ours_alone(path.stat(), lets_others_add=True)]
        more = [name for name in os.listdir(folder) if name != file.name and not name.startswith(_NOT_LOADED)]
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle, before Python 3.13
        raise ConfigError(f"cannot read {library}: {error}") from None
    if shared:
        raise ConfigError(
            f"{file} is not used, because other users could change {', '.join(map(str, shared))}: make it yours or "
            "root's alone (chown, chmod go-w), or let XDG_CACHE_HOME name another folder"
        )
    if more:
        raise ConfigError(f"{folder} is not used, because something else is in it ({more[0]}): remove it")
    return folder


def _is_ours_alone(found: os.stat_result, *, lets_others_add: bool = False) -> bool:
    """Whether only this user and root can write what was ``found``.

    Args:
        lets_others_add: a folder will do where others have files, too, but cannot rename ours (``/tmp``).
    """
    shared = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
    is_shared = found.st_mode & shared
    is_guarded = lets_others_add and found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and (not is_shared or bool(is_guarded))


def _is_own_group(gid: int) -> bool:
    """Whether it is this user's alone: where each has a group of that name, folders are mostly writable for it."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (group.gr_name, gid) == (user.pw_name, user.pw_gid) and {*group.gr_mem} <= {user.pw_name}


def _build(library: Path, source: str, options: Sequence[str]) -> None:
    compiler = _find_compiler()
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch:
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
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise ConfigError(f"CC={candidate}: {error}") from None
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
            return next((line for line in file if line.startswith(("flags", "Features"))), "")  # x86, ARM
    except OSError:
        return ""
