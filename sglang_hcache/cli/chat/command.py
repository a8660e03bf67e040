"""``hcache chat``: a page in the browser that talks to a running server."""

from __future__ import annotations

import errno
import math
import re
import socket
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from sglang_hcache.cli.chat.session import AnswerOptions
from sglang_hcache.cli.options import ApiKey, ServerUrl
from sglang_hcache.cli.server.client import authorization
from sglang_hcache.cli.server.ports import try_to_listen
from sglang_hcache.cli.signals import ended_by_interrupts
from sglang_hcache.core.errors import ConfigError

PAGE_PORT = 8088
_PANEL = "The page"
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*|\[[0-9a-fA-F:.]+\]", re.ASCII)

PagePort = Annotated[
    int,
    typer.Option(help="Port of the page; 0 picks a free one.", min=0, max=65535, rich_help_panel=_PANEL),
]
PageHost = Annotated[
    str,
    typer.Option(
        help="Address that the page listens on. There is no login: on any address other than this machine's own, "
        "anyone who can reach the page can use it.",
        rich_help_panel=_PANEL,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Host name that browsers may use for the page in addition to this machine's own, such as that of a "
        "reverse proxy. Can be repeated; `*.NAME` allows any subdomain. If --host is not this machine's own address "
        "and no name is given, any name is allowed.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
OpensBrowser = Annotated[
    bool,
    typer.Option("--open/--no-open", help="Open the page in this machine's browser.", rich_help_panel=_PANEL),
]


def chat(
    url: ServerUrl = "http://127.0.0.1:30000",
    api_key: ApiKey = None,
    host: PageHost = "127.0.0.1",
    port: PagePort = PAGE_PORT,
    allowed: AllowedHosts = None,
    opens_browser: OpensBrowser = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer, in tokens.", min=1)] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the most likely token. Default: the model's own.", min=0.0)
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt for every conversation.")] = "",
) -> None:
    """Chat with a running server in the browser, and see what the tier does.

    Holds several conversations at the same time. Each answer shows its time to first token (TTFT), its speed, and
    where its prompt's tokens came from: the GPU's KV cache, host memory, disk, or recomputation. A panel shows the
    tier.

    To see a restore: send a long message, press *Clear the GPU cache*, then send another one.

    The server needs no special settings; start it with `hcache serve`. Without a server, use `hcache demo --chat`.

    Conversations are kept in this process: they survive a reload of the page, but not this command. Nothing is written
    to disk. Needs the extra `chat`: `pip install "/path/to/sglang-hcache[chat]"`. Press Ctrl-C to quit.
    """
    if temperature is not None and not math.isfinite(temperature):
        raise ConfigError(f"--temperature: {temperature} is not allowed; 0 or a positive number")
    options = AnswerOptions(max_tokens=max_tokens, temperature=temperature, system=system)
    serve_page(
        url,
        api_key=api_key,
        host=host,
        port=port,
        allowed=allowed or (),
        options=options,
        opens_browser=opens_browser,
    )


def serve_page(
    url: str,
    *,
    host: str,
    port: int,
    options: AnswerOptions,
    opens_browser: bool,
    allowed: Sequence[str] = (),
    api_key: str | None = None,
    note: str = "",
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Serve the page until Ctrl-C, or until ``is_over``.

    Args:
        url: of the SGLang server.
        api_key: what it was given as ``--api-key``.
        port: 0 for a free one.
        allowed: as :func:`host_names` takes them.
        note: about the model, shown in the page.
        is_over: whether the server is gone for good. Asked again and again.

    Raises:
        ConfigError: NiceGUI is missing, the key cannot be sent, a name is none, or the page cannot listen there.
    """
    require_nicegui()
    names = host_names(host, allowed)
    authorization(api_key)  # its error belongs on the terminal, not into the page's log
    from sglang_hcache.cli.chat.page.app import PageSettings, run_page
    from sglang_hcache.cli.chat.page.tab import PageTexts
    from sglang_hcache.cli.logbooks import starters

    run_page(
        PageSettings(
            url=url,
            api_key=api_key,
            host=host,
            port=usable_port(host, port),
            names=names,
            options=options,
            texts=PageTexts(starters=starters(), note=note),
            opens_browser=opens_browser,
            is_over=is_over,
        )
    )


def host_names(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names under which browsers may ask for the page; none: any.

    A page of somebody else can have its own name point to this machine. The browser then lets it read what is served
    here, but still says that name.

    Args:
        host: what the page listens on.
        allowed: further names, ``*.`` before one for all below it.

    Raises:
        ConfigError: one of ``allowed`` is no name.
    """
    for name in allowed:
        if not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"--allow-host: {name!r} is not a name without scheme and port, as in chat.example.org"
            )
    is_own = host in _OWN_NAMES or host == "::1" or host.startswith("127.")
    if not (is_own or allowed):
        return ()
    return tuple(dict.fromkeys((*_OWN_NAMES, f"[{host}]" if ":" in host else host, *allowed)))


def require_nicegui() -> None:
    """Fail early if the page cannot be served here.

    Raises:
        ConfigError: NiceGUI is missing.
    """
    try:
        with ended_by_interrupts():
            import nicegui  # noqa: F401
    except ImportError:
        raise ConfigError(
            'the page needs NiceGUI (the extra `chat`); install it with: pip install "/path/to/sglang-hcache[chat]"'
        ) from None


def usable_port(host: str, port: int) -> int:
    """``port`` if the page can listen there; a free one for 0.

    Raises:
        ConfigError: it is in use or not allowed, or ``host`` is not an address of this machine.
    """
    try:
        return try_to_listen(host, port)
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host!r} is not an address: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port: {port} is in use on {host}; name another one, or 0 for a free one"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port: this user may not listen on {port}; name one above 1023") from None
        raise ConfigError(f"--host: cannot listen on {host}: {error.strerror}") from None
