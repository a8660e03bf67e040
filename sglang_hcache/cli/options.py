"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import httpx
import typer

from sglang_hcache.core.config import API_KEY_VARIABLE
from sglang_hcache.core.errors import ConfigError

_T = TypeVar("_T")


def parsed(flag: str, parse: Callable[[str], _T], text: str) -> _T:
    """What ``parse`` makes of the value of ``flag``.

    Raises:
        ConfigError: it raises ValueError.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _address(given: str) -> str:
    """Base address of a server; ``http://`` may be left out.

    Raises:
        typer.BadParameter: it is none.
    """
    address = given if "://" in given else f"http://{given}"
    has_user = "@" in given  # perhaps with a password, which is not to be shown
    told = "what was given" if has_user else repr(given)
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise typer.BadParameter(f"{told} is no address" + ("" if has_user else f": {error}")) from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
        raise typer.BadParameter(f"{told} is no address; one looks like http://127.0.0.1:30000")
    return address


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ServerUrl = Annotated[str, typer.Option(help="The SGLang server.", callback=_address)]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="The server's --api-key. Other users can see command-line arguments; prefer the "
        f"{API_KEY_VARIABLE} environment variable.",
        show_default=False,
    ),
]
