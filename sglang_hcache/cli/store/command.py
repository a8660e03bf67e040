"""``hcache store``: looking after the disk tier while no server runs."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from sglang_hcache.cli.options import AsJson
from sglang_hcache.cli.paths import given_path, named_path
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.store.each import Dirs, Show, for_each
from sglang_hcache.core.errors import ConfigError, HCacheError, StoreFullError
from sglang_hcache.core.units import SIZE_HELP, parse_duration, parse_size

app = typer.Typer(
    help="""Look after the disk tier's directories.

Name all directories of the store, in any order, or the server's YAML file with --config. For example
`hcache store stat /mnt/nvme0/hcache /mnt/nvme1/hcache`.

The ranks of a server with --tp-size have a store each, in `rank-0-of-2` and so on below these directories. Named like
this, each rank gets the command in turn, and the answer of --json is `{"ranks": [...]}`: for each its number as `rank`
with what a single store answers, and `error` where it failed. One rank alone: name its own directories.

stat, ls, verify and fsck (without --rebuild) only read and may run beside a server. gc, clear and fsck
--rebuild change the store: they refuse while a server uses it, and say which process that is.

Exit status: 0 all is well, 1 something is damaged, 2 the command was not carried out, 130 Ctrl-C, SIGTERM or SIGHUP
ended it; of several ranks the worst.
""",
    no_args_is_help=True,
)

Named = Annotated[
    list[str] | None,
    typer.Argument(metavar="DIR", help="All directories of the store, in any order; commas may join them."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=named_path,
        help="The file of --hcache-config: its `dirs`, in place of DIR",
    ),
]


@app.callback()
def _store(context: typer.Context) -> None:
    # What reads an index copies it, with every chunk key, to the folder for temporary files.
    context.with_resource(terminated_as_interrupted())


@app.command("stat")
def _stat(dirs: Named = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Sizes, counts and the health of each directory.

    Counts add up since the store was created. Beside a running server they are a moment old, and the health
    is what the server says, unless it has given its index up. Exit status 1 if a directory is out or the index is
    damaged, missing or given up (`healthy` of --json); chunks in quarantine, which are served no more, are
    counted only.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.view import StoreView

    def look(places: Dirs, show: Show) -> bool:
        with StoreView.open(places) as view:
            found = report.stat(view)
            show(found)
        return bool(found.data["healthy"])

    for_each(_stores(dirs, config), look, as_json=as_json)


@app.command("ls")
def _ls(
    dirs: Named = None,
    config: ConfigFile = None,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="List namespaces in place of runs, the largest first.")
    ] = False,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="List damaged chunks that are not served any more.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Most rows to list; 0: all.", min=0)] = 20,
    as_json: AsJson = False,
) -> None:
    """What is in the store: the newest runs, the largest namespaces or the quarantined chunks.

    A run is up to 16 chunks of 64 tokens that were written together. A namespace is one model with its weights
    and settings, and one tenant; `/server_info` of a server names its namespace.
    """
    from sglang_hcache.cli.store import lists
    from sglang_hcache.store.inspect.view import StoreView

    if namespaces and quarantined:
        raise ConfigError("--namespaces and --quarantined: give one of them")
    made = lists.list_namespaces if namespaces else lists.list_quarantined if quarantined else lists.list_runs

    def look(places: Dirs, show: Show) -> bool:
        with StoreView.open(places) as view:
            show(made(view, limit))
        return True

    for_each(_stores(dirs, config), look, as_json=as_json)


@app.command("verify")
def _verify(
    dirs: Named = None,
    config: ConfigFile = None,
    quarantined: Annotated[
        bool,
        typer.Option("--quarantined", help="Chunks in quarantine count as damage for the exit status, too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte and check it against the digest it was written with.

    Exit status 1 if something is damaged or a directory is out. Chunks that are in quarantine are not served
    any more: they are counted, but are no failure without --quarantined.

    It reads as fast as it can, which slows a running server's restores down. What the server evicts meanwhile
    is no damage.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.cli.store.verify import run_verification
    from sglang_hcache.store.inspect.view import StoreView

    def read(places: Dirs, show: Show) -> bool:
        with StoreView.open(places) as view:
            outcome = run_verification(view, quiet=as_json)
            show(report.verification(view, outcome))
        is_known = quarantined and any(run.quarantined for run in view.runs())
        is_all_there = all(volume.health.readable for volume in view.volumes)
        return is_all_there and not is_known and not outcome.damages

    for_each(_stores(dirs, config), read, as_json=as_json)


@app.command("gc")
def _gc(
    dirs: Named = None,
    config: ConfigFile = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Also evict the least valuable chunks until the store is no larger than SIZE, e.g. 20GB: "
            "those of all ranks together.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also delete the chunks that were written longer ago, such as 12h or 30d, "
            "and some up to an eighth younger.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Free what nobody needs: torn writes, files of no run, temporary files, rows without files.

    A server does this by itself when it starts. --to makes the store smaller once; how large a server lets it
    grow is set by its --hcache-disk-size, and how old by its --hcache-disk-max-age.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.maintenance import collect

    stores, size, max_age_s = _stores(dirs, config), _size(to), _age(older_than)
    to_bytes = None if size is None else size // len(stores)

    def free(places: Dirs, show: Show) -> bool:
        change = collect(places, to_bytes, max_age_s)
        show(report.collected(change))
        if to_bytes is not None and change.after.physical_bytes > to_bytes:
            raise StoreFullError(f"--to {to}: nothing is left to evict; index and directories take the rest")
        return True

    for_each(stores, free, as_json=as_json)


@app.command("clear")
def _clear(
    dirs: Named = None,
    config: ConfigFile = None,
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="ID",
            help="Remove only what is of this namespace, as `hcache store ls --namespaces` names it: "
            "32 digits. May be given several times.",
        ),
    ] = None,
    any_format: Annotated[
        bool,
        typer.Option(
            "--any-format",
            help="Delete the store itself, whatever version made it and however damaged it is: all files of it in "
            "these directories, and no others.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all chunks, or those of a namespace. The directories stay a store, with its counts.

    It asks first. Exit status 2 if the answer is not yes.

    Directories that are missing or sick lose what they hold when a server has them again. Until then nothing of it is
    served, except by a server that starts without all the others.

    A running server does the same when it is asked with POST /hicache/storage-backend/clear.

    --namespace needs all directories. What shares a file with others becomes a hole in it, or zeros where the file
    system makes no holes. If it is killed or fails, give the same command again.

    --any-format leaves directories in which a server begins a new store.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.maintenance import clear, erase, refuse_if_locked
    from sglang_hcache.store.inspect.view import StoreView

    stores, chosen = _stores(dirs, config), [_namespace_id(text) for text in namespaces or []]
    if any_format:
        _wipe(stores, chosen, yes=yes, as_json=as_json)
        return

    def remove(places: Dirs, show: Show) -> bool:
        show(report.erased(chosen, *erase(places, chosen)) if chosen else report.cleared(clear(places)))
        return True

    if not yes:
        with contextlib.ExitStack() as stack:
            views = [stack.enter_context(StoreView.open(places)) for places in stores]
            for view in views:
                refuse_if_locked(view)
            question = report.erase_question(views, chosen) if chosen else report.clear_question(views)
        _agree(question)
    for_each(stores, remove, as_json=as_json)


def _wipe(stores: list[Dirs], namespaces: list[bytes], *, yes: bool, as_json: bool) -> None:
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.maintenance import look_for_own, wipe

    if namespaces:
        raise ConfigError("--any-format deletes all namespaces; leave --namespace out")
    if not yes:
        _agree(report.wipe_question([item for places in stores for item in look_for_own(places)]))

    def remove(places: Dirs, show: Show) -> bool:
        show(report.wiped(wipe(places)))
        return True

    for_each(stores, remove, as_json=as_json)


@app.command("fsck")
def _fsck(
    dirs: Named = None,
    config: ConfigFile = None,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Write missing superblocks, take replaced disks in, make the index anew; then check.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check superblocks, index and files, and say how to mend what is wrong.

    Does not read the chunks: that is `hcache store verify`. Exit status 1 if something is wrong.

    --rebuild believes the headers in the segment files and nothing else. A directory without a superblock is
    taken in if it is empty (a new disk) or if its segments are of this store. Runs with a part that is gone
    are forgotten. Counts begin again, and chunks in quarantine are tried again.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.check import check
    from sglang_hcache.store.inspect.rebuild import rebuild as rebuild_store
    from sglang_hcache.store.inspect.view import StoreView

    def look(places: Dirs, show: Show) -> bool:
        done = rebuild_store(places) if rebuild else []
        with StoreView.open(places) as view:
            findings = check(view)
            show(report.checked(view, findings, done))
        return not any(finding.is_error for finding in findings)

    for_each(_stores(dirs, config), look, as_json=as_json)


def _agree(question: str) -> None:
    """No input is a no, as is its end; typer's own takes Ctrl-C for a no as well.

    Raises:
        HCacheError: the user does not type yes.
    """
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    if sys.stdin is None or sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise HCacheError("nothing is removed: the answer was not yes; --yes does not ask")


def _stores(dirs: list[str] | None, config: Path | None) -> list[tuple[Path, ...]]:
    """The directories of each store that is meant: of one, or of each rank. Raises ConfigError, StoreFormatError."""
    from sglang_hcache.store.volumes.agreement import stores_in

    return stores_in(_directories(dirs, config))


def _directories(dirs: list[str] | None, config: Path | None) -> tuple[Path, ...]:
    """The directories meant.

    Raises:
        ConfigError: none or too many ways to name them, or an empty name.
    """
    if (config is None) == (not dirs):
        raise ConfigError("name the store: either its directories (DIR) or its file with --config FILE")
    if config is None:
        parts = [part.strip() for text in dirs or [] for part in text.split(",")]
        if not all(parts):
            raise ConfigError("DIR: a name is empty; is a variable of your shell not set?")
        places = tuple(given_path("DIR", part) for part in parts)
        if len(set(places)) < len(places):
            raise ConfigError(f"DIR: {' '.join(parts)} names the same directory twice")
        return places
    from sglang_hcache.core.config import HCacheConfig
    from sglang_hcache.sglang_plugin.launch.settings_file import read_settings

    found = HCacheConfig.from_settings(read_settings(config, "--config")).dirs
    if not found:
        raise ConfigError(f"--config {config}: it sets no `dirs`, so there is no disk tier")
    return found


def _namespace_id(text: str) -> bytes:
    if re.fullmatch("[0-9a-f]{32}", text) is None:
        raise ConfigError(
            f"--namespace: {text!r} names no namespace; give the 32 digits that `hcache store ls --namespaces` lists"
        )
    return bytes.fromhex(text)


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_size(text)
    except ValueError:
        raise ConfigError(f"--to: {text!r} is not a size; write {SIZE_HELP}") from None
    if 0 < size < 100:  # nearly everything would go, for want of a unit
        raise ConfigError(f"--to: {text!r} is {size} bytes; write its unit, such as {size}GB")
    return size


def _age(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--older-than: {error}") from None
