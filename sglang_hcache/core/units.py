"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

_TOO_LARGE = 2**63
"""More than files and the index can count."""

SIZE_HELP = "a number of bytes, or one with a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (of 1024)"


def parse_size(text: str | int) -> int:
    """Bytes meant by ``text``: ``"8GB"`` is 8 * 10**9, ``"512MiB"`` is 512 * 2**20.

    Raises:
        ValueError: not a non-negative number with a known unit, or 8 EiB and more.
    """
    size = text if isinstance(text, int) and not isinstance(text, bool) else _with_unit(text)
    if size < 0:
        raise ValueError(f"{text} is negative")
    if size >= _TOO_LARGE:
        raise ValueError("a size is less than 8 EiB")
    return size


def _with_unit(text: object) -> int:
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write {SIZE_HELP}")
    return int(Decimal(match.group(1)) * factor)


def format_bytes(count: float) -> str:
    """``count`` bytes for a human reader, in powers of 1000: ``format_bytes(1.5e9) == "1.5 GB"``."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
