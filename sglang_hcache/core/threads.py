"""What threads of this process agree on."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 10


def let_others_go_first() -> None:
    """Lower the calling thread's priority: whoever decodes gets a core that both want."""
    own = threading.get_native_id()  # on Linux a priority is a thread's, not its process's
    with contextlib.suppress(OSError):  # a sandbox that forbids it: nothing but the order is lost
        os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
