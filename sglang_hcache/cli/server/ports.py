"""Where a server could listen."""

from __future__ import annotations

import random
import socket

from sglang_hcache.core.errors import HCacheError

LOCAL_HOST = "127.0.0.1"
# Below Linux's range of ephemeral ports, so that no outgoing connection takes the port before the server does.
_PORTS = range(20_000, 32_000)
_LAST_PORT = 2**16 - 1


def try_to_listen(host: str, port: int | str) -> int:
    """The port that a server would get now; for 0 one that is free.

    Raises:
        OSError: it would not get one. ``socket.gaierror``: ``host`` is no address.
        OverflowError: there is no such port.
    """
    if str(port).isdecimal() and int(port) > _LAST_PORT:  # getaddrinfo would take the rest of a division
        raise OverflowError(f"port {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # as of a..b
        raise socket.gaierror(socket.EAI_NONAME, "no host has such a name") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: not in TIME_WAIT
        probe.bind(address)
        return int(probe.getsockname()[1])


def free_port(but: int = 0) -> int:
    """A port that nobody listens on at :data:`LOCAL_HOST`, another one than ``but``.

    Raises:
        HCacheError: all are taken.
    """
    for port in random.sample(_PORTS, 200):
        if port == but:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOCAL_HOST, port))
            except OSError:
                continue
            return port
    raise HCacheError(f"no free port between {_PORTS.start} and {_PORTS.stop}")
