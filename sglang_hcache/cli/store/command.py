"""``hcache store``: looking after the disk tier while no server runs."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from sglang_hcache.cli.options import AsJson, parsed
from sglang_hcache.cli.paths import given_path, named_path
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.store.each import Dirs, Show, for_each
from sglang_hcache.core.errors import ConfigError, HCacheError, StoreFullError
from sglang_hcache.core.units import parse_duration, parse_size

app = typer.Typer(
    help="""Inspect and maintain the disk tier's directories.

Name all directories of the store, in any order, or the server's YAML file with --config. For example
`hcache store stat /mnt/nvme0/hcache /mnt/nvme1/hcache`.

With --tp-size each rank has its own store, in `rank-0-of-2` and so on below these directories. If you name the parent
directories, the command runs for each rank in turn, and --json prints `{"ranks": [...]}`: for each rank its number as
`rank`, the fields of a single store, and `error` if it failed. For a single rank, name that rank's directories.

stat, ls, verify and fsck (without --rebuild) only read and can run while a server uses the store. gc, clear and fsck
--rebuild change the store: they refuse to run while a server uses it, and say which process that is.

Exit status: 0 no problems; 1 something is damaged; 2 it did not run, or could not do all of it; 130 stopped by Ctrl-C,
SIGTERM or SIGHUP. With several ranks it is the worst of them.
""",
    no_args_is_help=True,
)

Named = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DIR", help="All directories of the store, in any order, separated by spaces or commas."
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=named_path,
        help="The --hcache-config file, whose `dirs` are used instead of DIR.",
    ),
]


@app.callback()
def _store(context: typer.Context) -> None:
    # What changes a store releases it before it ends.
    context.with_resource(terminated_as_interrupted())


@app.command("stat")
def _stat(dirs: Named = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Show sizes, counts and the health of each directory.

    Counts start when the store was created. While a server runs they lag slightly, and the health shown is what the
    server reports. Exit status 1 if a directory is out (`healthy` in --json). Quarantined chunks, which are no longer
    served, are only counted.
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
        bool, typer.Option("--namespaces", help="List namespaces instead of runs, the largest first.")
    ] = False,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="List damaged chunks, which are no longer served.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of rows; 0: all.", min=0)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest runs, the largest namespaces or the quarantined chunks.

    A run is up to 16 chunks of 64 tokens that were written together. A namespace stands for one model with its weights
    and settings, and one tenant; a server's `/server_info` shows its namespace.
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
        typer.Option("--quarantined", help="Quarantined chunks count as damage for the exit status, too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte and check it against the digest it was written with.

    Exit status 1 if something is damaged or lost, or a directory is out. Quarantined chunks are no longer served: they
    are counted, but are not a failure without --quarantined.

    It reads as fast as it can, which slows down the restores of a running server. Chunks that the server evicts during
    the check do not count as damage.
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
        return is_all_there and not is_known and not outcome.damages and not outcome.lost_runs

    for_each(_stores(dirs, config), read, as_json=as_json)


@app.command("gc")
def _gc(
    dirs: Named = None,
    config: ConfigFile = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Also evict the least valuable chunks until the store is no larger than SIZE, e.g. 20GB, for all "
            "ranks together.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also delete chunks that were written longer ago than this, such as 12h or 30d, and some that are up "
            "to an eighth younger.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete leftovers: torn writes, files that belong to no run, temporary files.

    A server does this by itself. --to shrinks the store once, by whole segments (perhaps far below SIZE); the server's
    --hcache-disk-size limits how large it grows, and --hcache-disk-max-age how old chunks get.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.maintenance import collect

    stores = _stores(dirs, config)
    size = None if to is None else parsed("--to", parse_size, to)
    max_age_s = None if older_than is None else parsed("--older-than", parse_duration, older_than)
    to_bytes = None if size is None else size // len(stores)

    def free(places: Dirs, show: Show) -> bool:
        change = collect(places, to_bytes, max_age_s)
        show(report.collected(change))
        if to_bytes is not None and change.after.physical_bytes > to_bytes:
            raise StoreFullError(f"--to {to}: nothing is left to evict; the directories take the rest")
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
            help="Remove only this namespace: the 32 digits that `hcache store ls --namespaces` lists. Can be "
            "repeated.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all chunks, or those of one namespace. The directories remain a store and keep its counts.

    Asks for confirmation first. Exit status 2 if the answer is not yes.

    Directories that are missing or unhealthy are purged when a server can use them again. Until then none of their
    chunks are served, except by a server that starts without all the other directories.

    A running server does the same on POST /hicache/storage-backend/clear.

    --namespace needs all directories. Chunks that share a file with other namespaces are replaced by a hole in it, or
    by zeros if the file system does not support holes. If the command is killed or fails, run it again.
    """
    from sglang_hcache.cli.store import report
    from sglang_hcache.store.inspect.maintenance import clear, erase, refuse_if_locked
    from sglang_hcache.store.inspect.view import StoreView

    stores, chosen = _stores(dirs, config), [_namespace_id(text) for text in namespaces or []]

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


@app.command("fsck")
def _fsck(
    dirs: Named = None,
    config: ConfigFile = None,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Find all runs by their headers anew, write missing superblocks, add replaced disks; then check.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check directories, superblocks, files and the headers in them, and say how to repair what is wrong.

    What a server knew and files no longer hold is lost, and is reported until a server has started. Does not read the
    chunks; `hcache store verify` does. Exit status 1 if something is wrong; notes, such as of a disk without room, do
    not count.

    --rebuild trusts only the headers in the segment files. A directory without a superblock is added if it is empty (a
    new disk) or if its segments belong to this store. Runs with missing parts are dropped. Counts start again at zero,
    and quarantined chunks are tried again.
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
