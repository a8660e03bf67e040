"""Options that several benchmarks have, read with errors that name the flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving.servers import METHODS
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.units import SIZE_HELP, format_bytes, parse_size

_CAPACITY_HELP = "A number of contexts (counted as K and V), such as 4, or a size, such as 2GB."

Methods = Annotated[str, typer.Option("--methods", help=f"Of {', '.join(METHODS)}.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results: JSON, CSV and a picture (PNG).")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Less of everything but methods, and a smaller model: under two minutes on two cores."
    ),
]
ModelPath = Annotated[
    Path | None, typer.Option("--model-path", help="Folder of a model. Default: a random one is written.")
]
DeviceContexts = Annotated[
    float, typer.Option("--device-contexts", help="Contexts of mean length that the KV pool holds.")
]
HostSize = Annotated[
    str,
    typer.Option(
        "--host-size",
        help=f"Chunks in host memory. {_CAPACITY_HELP} At least 2,176 tokens are made room for.",
    ),
]
DiskSize = Annotated[
    str | None, typer.Option("--disk-size", help=f"Disk tier. {_CAPACITY_HELP} Default: twice all contexts.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Where model and disk tiers are made, and removed. Default: a new folder here."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Equal seeds give equal requests.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, no table.")]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a tier may hold: so many contexts, or so many bytes."""

    contexts: float | None
    size_bytes: int | None

    def bytes_for(self, context_bytes: float) -> int:
        """In bytes, for contexts of so many bytes each."""
        if self.size_bytes is not None:
            return self.size_bytes
        assert self.contexts is not None
        return int(self.contexts * context_bytes)

    def __str__(self) -> str:
        return f"{self.contexts:g} contexts" if self.size_bytes is None else format_bytes(self.size_bytes)


def parse_capacity(flag: str, text: str) -> Capacity:
    """``text`` is a bare number of contexts, or a size with its unit.

    Raises:
        ConfigError: neither of the two.
    """
    try:
        contexts = float(text)
    except ValueError:
        try:
            return Capacity(None, parse_size(text))
        except ValueError:
            raise ConfigError(
                f"{flag}: {text!r} is not allowed; write a number of contexts, or a size: {SIZE_HELP}"
            ) from None
    if not 0 < contexts < math.inf:
        raise ConfigError(f"{flag}: {text!r} is not allowed; contexts must be more than 0")
    return Capacity(contexts, None)


def parse_numbers(flag: str, text: str, *, low: float, high: float) -> tuple[float, ...]:
    """Numbers with commas between them, each once, in the order given.

    Raises:
        ConfigError: one is no number or not from ``low`` to ``high``.
    """
    numbers: list[float] = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise ConfigError(
                f"{flag}: {part.strip()!r} is not allowed; write numbers from {low:g} to {high:g}, "
                "with commas between them"
            )
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def check_positive(**values: float | None) -> None:
    """Options by their Python names; None passes.

    Raises:
        ConfigError: one is not more than 0.
    """
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: {value:g} is not allowed; it must be more than 0")


def prepare_out(folder: Path | None) -> None:
    """Make the folder for the results now rather than find after an hour that it cannot be made.

    Raises:
        ConfigError: it cannot be made or written.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out: cannot write into {folder}: {error.strerror}") from None


def new_progress() -> Progress:
    """Bars on standard error, drawn rarely: what is measured shares the cores with them. Nothing in a file or pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    )
