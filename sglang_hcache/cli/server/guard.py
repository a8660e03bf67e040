"""Ends a process group with the process that started it, also where that one is killed."""

from __future__ import annotations

import subprocess

_END_GROUP = 'read _ || kill -s KILL -- "-$1"'
"""For a shell: its standard input ends when we do. It asks for SIGKILL to all of the group at once."""


class Guard:
    """A small process that waits for our end, from construction to ``dismiss``.

    The kernel could tell a server itself (``PR_SET_PDEATHSIG``), but when a thread of ours ends, and not its children
    that do not yet ask for the same. In a session of its own it outlives Ctrl-C and a closed terminal.

    Args:
        group: the process group.
    """

    def __init__(self, group: int) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _END_GROUP, "sh", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The group is gone, or about to be. Idempotent."""
        self._shell.kill()
        self._shell.communicate()
