"""The ``hcache`` command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import sglang_hcache
from sglang_hcache.cli.chat.command import chat
from sglang_hcache.cli.demo.command import demo
from sglang_hcache.cli.flags import flags
from sglang_hcache.cli.metrics import metrics
from sglang_hcache.cli.plan.command import plan
from sglang_hcache.cli.profile.command import profile
from sglang_hcache.cli.server.command import serve
from sglang_hcache.cli.store.command import app as store_app
from sglang_hcache.cli.terminal import never_fail_to_write
from sglang_hcache.cli.tiny_model.command import tiny_model
from sglang_hcache.cli.top import top
from sglang_hcache.core.errors import HCacheError

app = typer.Typer(
    name="hcache",
    help="""A tier below SGLang's radix prefix cache: keeps evicted prefixes in host memory and on disk.

`hcache serve --model-path MODEL --hcache-dirs DIR` starts a server, `hcache top` monitors it, and `hcache demo`
shows what the tier does without a model download or a GPU.
""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # wraps paragraphs to the terminal's width
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(store_app, name="store")


def main() -> None:
    """Run ``hcache``: our own errors and the system's end in one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        never_fail_to_write(stream)
    try:
        try:
            app()
        finally:
            print(end="", flush=True)  # output that cannot be written is an error here, not when Python ends
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            # rich and click end with 1 then, by which some commands say that something is damaged.
            raise SystemExit(2) from None
        raise
    except KeyboardInterrupt:  # before or after the command itself
        raise SystemExit(130) from None
    except (HCacheError, OSError) as error:
        if isinstance(error, OSError):
            sys.stdout = sys.stderr  # Python writes the rest when it ends, and would complain once more
        if isinstance(error, BrokenPipeError):
            raise SystemExit(2) from None  # the reader has seen enough
        for line in str(error).splitlines():
            print(f"hcache: error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hcache {sglang_hcache.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command(
    "serve",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Start SGLang's server with the tier.",
)(serve)
app.command("top")(top)
app.command("chat")(chat)
app.command("profile", context_settings={"ignore_unknown_options": True})(profile)
app.command("plan")(plan)
app.command("flags")(flags)
app.command("metrics")(metrics)
app.command("tiny-model")(tiny_model)
app.command("demo")(demo)
