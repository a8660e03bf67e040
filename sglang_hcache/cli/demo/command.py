"""``hcache demo``: what the tier does, without a model or a GPU at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_hcache.cli.chat.command import PAGE_PORT, AllowedHosts, OpensBrowser, PageHost, PagePort
from sglang_hcache.cli.options import AsJson
from sglang_hcache.cli.paths import named_path
from sglang_hcache.cli.signals import ended_by_interrupts
from sglang_hcache.core.errors import ConfigError

_WITH_PAGE_ONLY = ("host", "port", "allowed", "opens_browser")
_WITHOUT_PAGE_ONLY = ("conversations", "turns", "as_json")


def demo(
    context: typer.Context,
    conversations: Annotated[
        int, typer.Option(help="Number of conversations, held in turn; from 3 to 100.")
    ] = 4,
    turns: Annotated[int, typer.Option(help="Turns per conversation; from 2 to 100.")] = 4,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=named_path,
            help="Keep model, disk tier and logs in this new or empty folder; a second run uses them again.",
        ),
    ] = None,
    as_json: AsJson = False,
    with_page: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Instead, start one server with the tier and the page of `hcache chat` to talk to it. The model's "
            "weights are random, so its answers are meaningless.",
        ),
    ] = False,
    host: PageHost = "127.0.0.1",
    port: PagePort = PAGE_PORT,
    allowed: AllowedHosts = None,
    opens_browser: OpensBrowser = False,
) -> None:
    """Run conversations that outgrow the KV pool, with and without the tier; compare times and answers.

    Builds a small random model, so it needs no download. Without `--chat` it is for machines without a GPU. Exit status
    1 if an answer differs from the recomputed one or no turn was restored. With `--chat` you hold the conversations
    yourself, until Ctrl-C; exit status 2 if the server dies.
    """
    with ended_by_interrupts():
        from sglang_hcache.cli.demo.run import DemoSettings, run_demo
        from sglang_hcache.cli.demo.view import JsonView, TextView

    _check_used(context, with_page=with_page)
    if with_page:
        from sglang_hcache.cli.demo.chat import run_chat_demo

        run_chat_demo(keep=keep, host=host, port=port, allowed=allowed or (), opens_browser=opens_browser)
        return
    settings = DemoSettings(conversations=conversations, turns=turns, keep=keep)
    report = run_demo(settings, JsonView(Console(stderr=True)) if as_json else TextView(Console()))
    if report.failure is not None:
        print(f"hcache demo: {report.failure}", file=sys.stderr)
        raise typer.Exit(1)


def _check_used(context: typer.Context, *, with_page: bool) -> None:
    """Refuse what would change nothing."""
    unused = _WITHOUT_PAGE_ONLY if with_page else _WITH_PAGE_ONLY
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in unused and source is not None and source.name == "COMMANDLINE":
            belongs = "to the demo without --chat" if with_page else "to the page of --chat"
            names = "/".join((*option.opts, *option.secondary_opts))
            raise ConfigError(f"{names}: it belongs {belongs}; leave it out")
