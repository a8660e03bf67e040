"""Sizes and durations as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "TiB": 2**40,
    "TB": 10**12,
    "GiB": 2**30,
    "GB": 10**9,
    "MiB": 2**20,
    "MB": 10**6,
    "KiB": 2**10,
    "KB": 10**3,
    "B": 1,
}
"""The largest first."""

_FACTORS = {"": 1, **{unit.upper(): factor for unit, factor in _UNITS.items()}}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

_TOO_LARGE = 2**63
"""More than files can count."""

_LEAST_WITHOUT_UNIT = 10**6
"""A smaller number is one whose unit was forgotten: nobody counts a tier in bytes."""

SIZE_HELP = "a number with a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB (of 1024)"


def parse_size(text: str | int) -> int:
    """Bytes meant by ``text``: ``"8GB"`` is 8 * 10**9, ``"512MiB"`` is 512 * 2**20.

    Raises:
        ValueError: not a non-negative number with a known unit, 8 EiB and more, or so small a number without a unit
            that it was forgotten.
    """
    return _size(text)


def _size(text: str | int, or_else: str = "") -> int:
    written, factor = (text, 1) if isinstance(text, int) and not isinstance(text, bool) else _with_unit(text)
    size = int(written * factor)
    if size < 0:
        raise ValueError(f"{text} is negative")
    if size >= _TOO_LARGE:
        raise ValueError("a size is less than 8 EiB")
    is_bare = isinstance(text, int) or text.strip()[-1].isdigit()
    if is_bare and 0 < written < _LEAST_WITHOUT_UNIT:
        number = str(text).strip()
        raise ValueError(f"{text!r} is {size} bytes; write its unit, such as {number}GB{or_else}")
    return size


def _with_unit(text: object) -> tuple[Decimal, int]:
    """The number, and what it is multiplied by."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write {SIZE_HELP}")
    return Decimal(match.group(1)), factor


def exact_size(count: int) -> str:
    """``count`` bytes as :func:`parse_size` reads them back, in the largest unit: ``4 * 2**30`` is ``4GiB``."""
    unit = next(name for name, factor in _UNITS.items() if count % factor == 0) if count else "B"
    return f"{count // _UNITS[unit]}{unit}"


_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_size_or_percent(text: str | int) -> int | str:
    """Bytes meant by ``text``, or a share of something as text such as ``"10%"``.

    Raises:
        ValueError: as :func:`parse_size`; or a share of 100 % and more.
    """
    if isinstance(text, str) and "%" in text:
        match = _PERCENT.fullmatch(text)
        if match is None or float(match.group(1)) >= 100:
            raise ValueError("a share is a number below 100 with a percent sign, such as 10%")
        return f"{match.group(1)}%"
    return _size(text, ", or a share such as 10%")


_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")

_LONGEST_S = 36_500 * 86_400

DURATION_HELP = (
    "a number with a unit: s, m, h, d or w (seconds, minutes, hours, days, weeks), such as 12h or 30d"
)


def parse_duration(text: object) -> float:
    """Seconds meant by ``text``: ``"12h"`` is 43,200.

    Raises:
        ValueError: not a number with a known unit, less than a second or more than a hundred years.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a time; write {DURATION_HELP}")
    seconds = float(match.group(1)) * _SECONDS_OF[match.group(2)]
    if not 1 <= seconds <= _LONGEST_S:
        raise ValueError(f"{text!r} is not a time between a second and 36500d")
    return seconds


def format_duration(seconds: float) -> str:
    """``seconds`` for a human reader, in the largest unit that they are a whole number of: ``43_200`` is ``12h``."""
    unit = next((name for name in reversed(_SECONDS_OF) if seconds % _SECONDS_OF[name] == 0), "s")
    return repr(seconds / _SECONDS_OF[unit]).removesuffix(".0") + unit


def format_bytes(count: float) -> str:
    """``count`` bytes for a human reader, in powers of 1000: ``format_bytes(1.5e9) == "1.5 GB"``."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if round(abs(value), 1) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
