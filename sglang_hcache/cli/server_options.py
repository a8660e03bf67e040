"""Options of commands that talk to a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_hcache.core.config import API_KEY_VARIABLE

ServerUrl = Annotated[str, typer.Option(help="The SGLang server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="What the server was given as --api-key. Other users of this machine see arguments: use the variable.",
        show_default=False,
    ),
]
