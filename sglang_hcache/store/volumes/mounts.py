"""Where directories lie: what is mounted, and what ``/etc/fstab`` says should be."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTED = Path("/proc/self/mountinfo")
_LISTED = Path("/etc/fstab")
_READ_ONLY = frozenset({"ro", "emergency_ro", "shutdown"})
"""The last two are what ext4 says after an error; ``statvfs`` does not tell there."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
"""How both files write blanks in names."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system that is mounted."""

    point: Path
    kind: str
    """Such as ``ext4``."""
    source: str
    """Such as ``/dev/nvme0n1p1``."""
    is_read_only: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.source}, mounted at {self.point}"


def mount_of(path: Path) -> Mount | None:
    """The file system on which ``path`` lies, or would lie; None if that is not known."""
    place = Path(os.path.realpath(path))
    found = [mount for mount in _mounted() if place.is_relative_to(mount.point)]
    return max(
        reversed(found), key=lambda mount: len(mount.point.parts), default=None
    )  # the last one is on top


def is_read_only(path: Path) -> bool:
    """Whether nothing can be written to the file system on which ``path`` lies. Raises OSError."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    mount = mount_of(path)
    return mount is not None and mount.is_read_only


def check_mounted_as_listed(path: Path) -> None:
    """Whether ``path`` lies below a mount point of ``/etc/fstab``, without ``noauto``, where nothing is mounted.

    Raises:
        OSError: it does, on the disk that is mounted further up.
    """
    place, mount = Path(os.path.realpath(path)), mount_of(path)
    if mount is None:
        return  # nobody can tell
    for point in _listed():  # real places: a listed name that is a link is never above one
        if place.is_relative_to(point) and mount.point in point.parents:
            raise OSError(
                errno.ENODEV, f"nothing is mounted at {point}, which {_LISTED} lists: mount it first"
            )


def _mounted() -> Iterator[Mount]:
    for line in filter(None, _lines(_MOUNTED)):
        fields, _, rest = line.partition(" - ")
        *_, point, options = fields.split()[:6]
        kind, source, *more = rest.split()
        found = {*options.split(","), *",".join(more).split(",")}
        yield Mount(Path(_plain(point)), kind, _plain(source), not _READ_ONLY.isdisjoint(found))


def _listed() -> Iterator[Path]:
    for line in _lines(_LISTED):
        fields = [] if line.lstrip().startswith("#") else line.split()
        is_noauto = len(fields) > 3 and "noauto" in fields[3].split(",")
        if len(fields) > 1 and fields[1].startswith("/") and not is_noauto:
            yield Path(os.path.normpath(_plain(fields[1])))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").split("\n")
    except OSError:  # a container may have neither
        return []


def _plain(name: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), name)
