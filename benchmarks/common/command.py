"""How every command runs, tells its results, and ends."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console

from common.gathered import Gathered
from common.stopping import Stopping
from common.terminal import new_console
from sglang_hcache.core.errors import HCacheError

Results = dict[str, Any]


class Report(Protocol):
    """How results are told; a module with these two functions is one."""

    def show(self, data: Results, console: Console, /) -> None:
        """To people."""

    def write(self, folder: Path, data: Results, /) -> None:
        """Files."""


ENDED_EARLY = (
    "On Ctrl-C or SIGTERM it ends its servers, removes what it created, writes the results so far, with "
    '"complete": false and what is missing, and exits with status 130 or 143. A second signal ends it immediately.'
)
"""For the end of every command's help."""
MOST_NAMES = 12
"""In one message; JSON has all."""


def new_app() -> typer.Typer:
    """For one command. Help is printed as it is written."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@contextmanager
def errors_told(name: str) -> Iterator[None]:
    """What a user can fix is one line on standard error, and exit status 2. Also a decorator.

    Ctrl-C before :func:`carry_out` is one line as well, and status 130.
    """
    try:
        yield
    except (HCacheError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"{name}: ended by Ctrl-C before it began to measure: there are no results", file=sys.stderr)
        raise typer.Exit(130) from None


def carry_out(
    name: str,
    measure: Callable[[Path, Gathered], None],
    report: Report,
    *,
    folder: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure in a scratch folder, which is removed however that ends; print the results and write them.

    A signal or an error ends the measuring; the results are then those that were there.

    Args:
        measure: told the scratch folder and where results are gathered.
        report: shows the results, where ``as_json`` is not wanted, and writes them to ``out`` if that is given.
        folder: where the scratch folder is made; None: the current one.

    Raises:
        typer.Exit: status 1: answers are unequal; 130, 143: it was ended by Ctrl-C or SIGTERM.
        Exception: what went wrong.
    """
    prefix = name.replace("_", "-") + "-"
    found, failure = Gathered(), None
    with Stopping() as stopping:
        try:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder or Path.cwd()) as scratch:
                stopping.until_stopped(lambda: measure(Path(scratch).absolute(), found))
        except Exception as error:
            failure = error
        data = found.results()
        try:
            if found.measured:
                _tell(report, data, out, as_json=as_json)
        finally:
            if failure is not None:  # what went wrong first
                raise failure
        if stopping.signal is not None:
            print(ended_early(name, stopping, found, out), file=sys.stderr)
            raise typer.Exit(stopping.exit_status)
    if data.get("unequal"):
        raise typer.Exit(1)


def _tell(report: Report, data: Results, out: Path | None, *, as_json: bool) -> None:
    """Print the results and write them: there may be no room for files, or nobody who reads."""
    try:
        if as_json:
            print(json.dumps(data, indent=2), flush=True)
        else:
            report.show(data, new_console())
    except (BrokenPipeError, SystemExit):  # rich's: nobody reads any more
        # What is left could not be written at the end, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if out is not None:
            report.write(out, data)


def ended_early(name: str, stopping: Stopping, found: Gathered, out: Path | None) -> str:
    """What ended the command, what there is of its results, where, and what is missing."""
    if not found.measured:
        return f"{name}: ended by {stopping.cause} before anything was measured: there are no results"
    where = "measured, and not written without --out" if out is None else f"written to {out}"
    return (
        f"{name}: ended by {stopping.cause}\n"
        f"  {where}: {_listed(found.measured)}\n"
        f"  not measured: {_listed(found.missing) or 'nothing is missing'}"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return "; ".join(names[:MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
