"""Options that several benchmarks have, read with errors that name the flag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from sglang_hcache.core.errors import ConfigError

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results: JSON, CSV and a chart (PNG).")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Smaller sizes, same comparison: under two minutes on two idle cores.",
    ),
]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model-path",
        help="Model folder; without weight files it is served with SGLang's dummy weights, which are good for "
        "times only. Default: a random model is written.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        exists=True,
        file_okay=False,
        help="Where the model and disk tiers are created and removed. Default: a new folder here.",
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(
        "--logs",
        exists=True,
        file_okay=False,
        help="Folder in which to keep the servers' logs. Default: they are removed with the rest.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="The random model's type: bfloat16 or float32. Some processors multiply bfloat16 slowly."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same requests.", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


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


def parse_whole_numbers(flag: str, text: str, *, low: int, multiple: int = 1) -> tuple[int, ...]:
    """Whole numbers with commas between them, such as ``1024,4096``, each once.

    Raises:
        ConfigError: one is no whole number, below ``low`` or not a multiple.
    """
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a list of whole numbers such as 1024,4096") from None
    for number in found:
        if number < low or number % multiple:
            of = f", a multiple of {multiple}" if multiple > 1 else ""
            raise ConfigError(f"{flag}: {number} is not allowed; at least {low}{of}")
    return found


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
