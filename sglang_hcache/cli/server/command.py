"""``hcache serve``: SGLang's server with the tier switched on, also on a machine without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from sglang_hcache.cli.flags import describe, settings_table
from sglang_hcache.cli.report import print_report
from sglang_hcache.cli.server import tier_flags
from sglang_hcache.cli.server.arguments import values_of
from sglang_hcache.core.errors import ConfigError

_INTRODUCTION = """Usage: hcache serve --model-path MODEL [SGLANG_ARGUMENTS]...

Takes the arguments of python -m sglang.launch_server and replaces itself with that server, with the tier switched on. \
On a machine without a GPU it adds --device cpu --attention-backend torch_native --disable-overlap-schedule and \
whatever else SGLang needs there.
"""
_END = "\nSGLang's own arguments: python -m sglang.launch_server --help"


def _print_help(wanted: bool) -> None:
    if not wanted:
        return
    table = settings_table(setting for setting in describe() if setting.flag is not None)
    print_report([Group(Text(_INTRODUCTION), table, Text(_END))])  # in a group texts are wrapped as well
    raise typer.Exit


def _names_model_or_help(flag: str) -> bool:
    """Or the file that may name one. SGLang takes abbreviations."""
    is_short = len(flag) >= len("--model-p") and "--model-path".startswith(flag)
    return is_short or flag == "--model" or flag.startswith(("--config", "-h", "--he"))


def serve(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SGLANG_ARGUMENTS")] = None,
    show_help: Annotated[bool, typer.Option("--help", callback=_print_help, is_eager=True)] = False,
) -> None:
    """Start SGLang's server with the tier.

    Takes the arguments of `python -m sglang.launch_server` and replaces itself with that server. It adds
    `--hierarchical-cache hcache` and, on a machine without a GPU, the flags that SGLang needs there. `hcache flags`
    lists the tier's flags.

    `hcache serve --model-path MODEL --hcache-dirs /mnt/nvme0/hcache --hcache-disk-size 500GB`
    """
    from sglang_hcache.cli.server.launch import become_server

    given = arguments or []
    names = [one.partition("=")[0] for one in given]
    if not any(map(_names_model_or_help, names)):  # SGLang says so on 300 lines
        raise ConfigError(
            "--model-path is missing: name the model; `hcache serve --help` lists the tier's flags"
        )
    tier_flags.check(given)
    tier_flags.check_model([*values_of(given, "--model-path"), *values_of(given, "--model")])
    become_server(given)
