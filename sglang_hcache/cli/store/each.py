"""A command for each store that is meant: one, or those of a server's ranks in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from sglang_hcache.cli.report import Report, print_report
from sglang_hcache.core.errors import HCacheError

Dirs = tuple[Path, ...]
"""The directories of one store."""
Show = Callable[[Report], None]
Work = Callable[[Dirs, Show], bool]
"""Does it for one store, and shows what it has to say; returns whether all is well."""


def for_each(stores: Sequence[Dirs], work: Work, *, as_json: bool) -> None:
    """Do ``work`` for each of ``stores``, which are of one rank each if there are several.

    Raises:
        HCacheError: the only one failed. One rank does not keep the others from their turn.
        typer.Exit: with the worst status of all, if that is not 0.
    """
    if len(stores) == 1:
        status = 0 if work(stores[0], lambda report: report.show(as_json=as_json)) else 1
    else:
        ranks = _Ranks(len(stores), as_json=as_json)
        status = max([ranks.turn(rank, dirs, work) for rank, dirs in enumerate(stores)])
        if as_json:
            Report({"ranks": ranks.answers}, []).show(as_json=True)
    if status:
        raise typer.Exit(status)


class _Ranks:
    """What the ranks answer: as text at once, each below its heading, as JSON all together."""

    def __init__(self, number: int, *, as_json: bool) -> None:
        self.answers: list[dict[str, Any]] = []
        self._number = number
        self._as_json = as_json

    def turn(self, rank: int, dirs: Dirs, work: Work) -> int:
        """The exit status of one."""
        name, answer = f"rank {rank} of {self._number}", dict[str, Any](rank=rank)
        self.answers.append(answer)

        def show(report: Report) -> None:
            answer.update(report.data)
            if not self._as_json:
                print_report(report.parts)

        if not self._as_json:
            print_report([*([Text()] if rank else []), Text(name, "bold")])
        try:
            return 0 if work(dirs, show) else 1
        except HCacheError as error:
            answer["error"] = str(error)
            print(end="", flush=True)
            for line in str(error).splitlines():
                print(f"hcache: error: {name}: {line}", file=sys.stderr)
            return 2
