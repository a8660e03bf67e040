"""Whether a server could listen somewhere."""

from __future__ import annotations

import socket


def try_to_listen(host: str, port: int | str) -> int:
    """The port that a server would get now; for 0 one that is free.

    Raises:
        OSError: it would not get one. ``socket.gaierror``: ``host`` is no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: not in TIME_WAIT
        probe.bind(address)
        return int(probe.getsockname()[1])
