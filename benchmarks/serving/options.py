"""Options of the comparisons of methods: which ones, and how much their caches hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.servers import METHODS
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.units import SIZE_HELP, format_bytes, parse_size

CAPACITY_HELP = "A number of contexts (counted as K and V), such as 4, or a size, such as 2GB."

Methods = Annotated[str, typer.Option("--methods", help=f"Any of {', '.join(METHODS)}.")]
DeviceContexts = Annotated[
    float, typer.Option("--device-contexts", help="Contexts of mean length that the KV pool holds.")
]
HostSize = Annotated[
    str,
    typer.Option(
        "--host-size",
        help=f"Chunks in host memory. {CAPACITY_HELP} There is room for at least 2,176 tokens.",
    ),
]
DiskSize = Annotated[
    str | None,
    typer.Option(
        "--disk-size", help=f"Disk tier, at least 256MiB. {CAPACITY_HELP} Default: twice all contexts."
    ),
]
Disk = Annotated[bool, typer.Option(help="Use a disk tier below host memory.")]

Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        help="Measurements of each load, with everything emptied before each. Use 5 or more for reliable ratios.",
        min=1,
    ),
]

QUICK_S = 100.0
"""That a quick run may take where no time limit is given."""


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


def settings_as_json(settings: Any) -> dict[str, Any]:
    """What the user chose, a dataclass, as results have it: names of files and folders, capacities as text."""
    return {field.name: _told(getattr(settings, field.name)) for field in fields(settings)}


def _told(value: object) -> object:
    if isinstance(value, Capacity):
        return str(value)
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def time_limit_s(minutes: float | None, *, quick: bool) -> float | None:
    """Seconds that a run may take; None: as long as it takes."""
    if minutes is not None:
        return 60 * minutes
    return QUICK_S if quick else None


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
