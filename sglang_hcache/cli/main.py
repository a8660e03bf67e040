"""The ``hcache`` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sglang_hcache
from sglang_hcache.cli.chat.command import PAGE_PORT, AllowedHosts, OpensBrowser, PageHost, PagePort, chat
from sglang_hcache.cli.flags import flags
from sglang_hcache.cli.metrics import metrics
from sglang_hcache.cli.paths import given_path
from sglang_hcache.cli.plan.command import plan
from sglang_hcache.cli.profile.command import profile
from sglang_hcache.cli.server import tier_flags
from sglang_hcache.cli.store.command import app as store_app
from sglang_hcache.cli.terminal import OutputError, checked_output, never_fail_to_write
from sglang_hcache.cli.top import top
from sglang_hcache.core.config import (
    COMMAND_LINE_FLAGS,
    CONFIG_FLAG,
    FLAG_FIELDS,
    TIER_FLAG,
    flag_help,
    flag_of,
)
from sglang_hcache.core.errors import ConfigError, HCacheError

app = typer.Typer(
    name="hcache",
    help="""A tier below SGLang's radix prefix cache: what is evicted there is kept in host memory and on disk.

`hcache serve --model-path MODEL --hcache-dirs DIR` starts a server, `hcache top` watches it, and `hcache demo`
shows what the tier does without a model or a GPU at hand.
""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # wraps paragraphs to the terminal's width
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(store_app, name="store")


def main() -> None:
    """Entry point of ``hcache``: our own errors end in one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        never_fail_to_write(stream)
    try:
        with checked_output():
            app()
    except HCacheError as error:
        if isinstance(error, OutputError) and isinstance(error.__cause__, BrokenPipeError):
            raise SystemExit(2) from None  # whoever reads has seen enough
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


def _print_serve_help(wanted: bool) -> None:
    if not wanted:
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row(TIER_FLAG, COMMAND_LINE_FLAGS[TIER_FLAG])
    for name in FLAG_FIELDS:
        table.add_row(flag_of(name), escape(flag_help(name)))
    table.add_row(CONFIG_FLAG, COMMAND_LINE_FLAGS[CONFIG_FLAG])
    console = Console()
    console.print("Usage: hcache serve --model-path MODEL [SGLang arguments...]\n", markup=False)
    console.print(
        "Takes the arguments of python -m sglang.launch_server and becomes that server, with the tier "
        "switched on. On a machine without a GPU it adds --device cpu --attention-backend torch_native "
        "--disable-overlap-schedule and what else SGLang needs there.\n",
        markup=False,
    )
    console.print(table)
    console.print("\nSGLang's own arguments: python -m sglang.launch_server --help", markup=False)
    raise typer.Exit


@app.command(
    "serve",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Start SGLang's server with the tier.",
)
def _serve(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[SGLang arguments...]")] = None,
    show_help: Annotated[bool, typer.Option("--help", callback=_print_serve_help, is_eager=True)] = False,
) -> None:
    """Start SGLang's server with the tier.

    Takes the arguments of `python -m sglang.launch_server` and becomes that server. It adds `--hierarchical-cache
    hcache` and, on a machine without a GPU, what SGLang needs there. docs/flags.md has the tier's flags.

    `hcache serve --model-path MODEL --hcache-dirs /mnt/nvme0/hcache --hcache-disk-size 500GB`
    """
    # Here, as below, to keep `hcache --help` quick.
    from sglang_hcache.cli.server.launch import serve, values_of

    given = arguments or []
    if not any(
        one.startswith(("--mo", "--config", "-h", "--he")) for one in given
    ):  # SGLang says so on 300 lines
        raise ConfigError(
            "--model-path is missing: name the model; `hcache serve --help` lists the tier's flags"
        )
    tier_flags.check(given)
    tier_flags.check_model([*values_of(given, "--model-path"), *values_of(given, "--model")])
    serve(given)


app.command("top")(top)
app.command("chat")(chat)
app.command("profile", context_settings={"ignore_unknown_options": True})(profile)
app.command("plan")(plan)
app.command("flags")(flags)
app.command("metrics")(metrics)


@app.command("tiny-model")
def _tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder for the model.")],
    family: Annotated[
        str,
        typer.Option(
            help="llama, mistral, qwen1.5, qwen2, qwen2_moe, qwen3, opt, gemma, gemma2, phi, phi3, olmo, olmo2, "
            "stablelm, mixtral or gpt2."
        ),
    ] = "llama",
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size.", min=1)] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads if not given.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_position: Annotated[int, typer.Option(help="Longest context, tokens.", min=1)] = 8192,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
) -> None:
    """Write a small random model with a tokenizer, without any download."""
    from sglang_hcache.cli.tiny_model.model import TinyModel, write_tiny_model

    model = TinyModel(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        dtype=dtype,
        max_position=max_position,
        seed=seed,
    )
    write_tiny_model(folder, model)
    print(f"wrote {folder}")


@app.command("demo")
def _demo(
    conversations: Annotated[int, typer.Option(help="Conversations, held in turn; at least 3.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each conversation; at least 2.")] = 4,
    dirs: Annotated[
        str,
        typer.Option(
            metavar="DIR,...", help="Directories of the disk tier, kept. Default: beside the model."
        ),
    ] = "",
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep model, disk tier and logs here; a second run finds them again."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print measurements as JSON, no table.")] = False,
    with_page: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Instead: one server with the tier, and the page of `hcache chat` to talk to it. The model's weights "
            "are random: it answers with words without meaning.",
        ),
    ] = False,
    host: PageHost = "127.0.0.1",
    port: PagePort = PAGE_PORT,
    allowed: AllowedHosts = None,
    opens_browser: OpensBrowser = False,
) -> None:
    """Hold conversations that outgrow the KV pool, with the tier and without it; compare times and answers.

    Builds a small random model, so it needs no download and no GPU. Exit status 1 if an answer differs from
    the recomputed one or no turn was restored. With `--chat` it is you who talks, until Ctrl-C.
    """
    from sglang_hcache.cli.demo.run import DemoSettings, run_demo
    from sglang_hcache.cli.demo.view import choose_view

    folders = tuple(given_path("--dirs", part.strip()) for part in dirs.split(",") if part.strip())
    if with_page:
        from sglang_hcache.cli.demo.chat import run_chat_demo

        run_chat_demo(
            dirs=folders, keep=keep, host=host, port=port, allowed=allowed or (), opens_browser=opens_browser
        )
        return
    settings = DemoSettings(conversations=conversations, turns=turns, dirs=folders, keep=keep)
    with choose_view(as_json=as_json) as view:
        report = run_demo(settings, view)
    if report.failure is not None:
        print(f"hcache demo: {report.failure}", file=sys.stderr)
        raise typer.Exit(1)
