"""How every command runs, tells its results, and ends."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from common.terminal import new_console
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.core.errors import HCacheError

Results = dict[str, Any]


def new_app() -> typer.Typer:
    """For one command. Help is printed as it is written."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@contextmanager
def errors_told(name: str) -> Iterator[None]:
    """What a user can mend is one line on standard error, and exit status 2. Also a decorator."""
    try:
        yield
    except (HCacheError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def carry_out(
    name: str,
    measure: Callable[[Path], Results],
    *,
    show: Callable[[Results, Console], None],
    write: Callable[[Path, Results], None],
    folder: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure in a scratch folder, which is removed however that ends; then write the results and print them.

    Args:
        measure: told the scratch folder.
        show: for people, where ``as_json`` is not wanted.
        write: files, into ``out`` if there is one.
        folder: where the scratch folder is made; None: the current one.

    Raises:
        typer.Exit: status 1: answers are unequal.
        HCacheError, OSError: what went wrong.
    """
    prefix = name.replace("_", "-") + "-"
    with (
        terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix=prefix, dir=folder or Path.cwd()) as scratch,
    ):
        data = measure(Path(scratch).absolute())
    if out is not None:
        write(out, data)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(data, new_console())
    if data.get("unequal"):
        raise typer.Exit(1)
