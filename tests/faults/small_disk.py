"""A small file system of its own: in memory, or ext3 or ext4 in a file."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
import time
from pathlib import Path

import pytest

DISK_BYTES = 48 * 2**20
_PIECE = 2**16


class SmallDisk:
    """A mounted file system of 48 MiB. Needs the right to mount; see :func:`small_disk`.

    Args:
        kind: ``tmpfs``, ``ext4``, or ``ext3``, which cannot preallocate and, as it is mounted here, takes O_DIRECT but
            goes through the page cache.
        base: a folder for the mount point and the image.
    """

    def __init__(self, kind: str, base: Path) -> None:
        self.kind = kind
        self.mount_point = base / "mounted"
        self.mount_point.mkdir()
        self._source = "tmpfs"
        self._mounts = 0
        self._loop = ""
        if kind != "tmpfs":
            image = base / "image"
            with open(image, "wb") as file:
                file.truncate(DISK_BYTES)
            _run(f"mkfs.{kind}", "-q", "-F", "-m", "0", str(image))
            self._loop = self._source = _run("losetup", "--find", "--show", str(image))

    @property
    def others_file(self) -> Path:
        """What somebody else has on the disk."""
        return self.mount_point / "others"

    def mount(self) -> None:
        options = {"tmpfs": [f"size={DISK_BYTES}"], "ext3": ["data=journal"], "ext4": []}[self.kind]
        self._mount("-t", self.kind, "-o", ",".join(["noatime", *options]), self._source)

    def cover(self) -> None:
        """Mount it once more over itself, read-only: what is opened from now on cannot be written."""
        self._mount("--bind", str(self.mount_point))
        for left in reversed(range(50)):
            try:
                _run("mount", "-o", "remount,bind,ro", str(self.mount_point))
                return
            except subprocess.CalledProcessError:  # busy while a store writes its state
                if not left:
                    raise
                time.sleep(0.05)

    def abort(self) -> None:
        """What ext4 does when it finds itself damaged: read-only until it is mounted again."""
        _run("mount", "-o", "remount,abort", str(self.mount_point))

    def unmount(self) -> None:
        """Take the uppermost mount away, though files of it may be open."""
        _run("umount", "--lazy", str(self.mount_point))
        self._mounts -= 1

    def close(self) -> None:
        """Leave nothing mounted."""
        while self._mounts:
            self.unmount()
        if self._loop:
            _run("losetup", "--detach", self._loop)

    def free_bytes(self) -> int:
        found = os.statvfs(self.mount_point)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Others take all but ``leave_bytes`` of what is free now, or all: also what a store gives up meanwhile."""
        wanted = self.free_bytes() - leave_bytes if leave_bytes else math.inf
        with open(self.others_file, "ab", buffering=0) as file:
            for size in (_PIECE, 4096):
                while wanted >= size and self.free_bytes() >= size:
                    try:
                        wanted -= file.write(bytes(size))
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        break
            os.fsync(file.fileno())

    def empty(self) -> None:
        """Others delete theirs."""
        self.others_file.unlink(missing_ok=True)

    def _mount(self, *arguments: str) -> None:
        _run("mount", *arguments, str(self.mount_point))
        self._mounts += 1


def small_disk(kind: str, base: Path) -> SmallDisk:
    """A mounted disk; skips the test where that is not permitted or the tools are missing."""
    disk = None
    try:
        disk = SmallDisk(kind, base)
        disk.mount()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        if disk is not None:
            with contextlib.suppress(subprocess.CalledProcessError):
                disk.close()
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        pytest.skip(f"no {kind} of our own can be mounted here: {reason}")
    return disk


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
