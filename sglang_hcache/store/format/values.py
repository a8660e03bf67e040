"""Named values of the index: JSON, of which what makes no sense counts as nothing (docs/store-format.md, "Index")."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def read_value(text: str | None, build: Callable[[Any], dict[K, V]]) -> dict[K, V]:
    """What ``build`` makes of the JSON in ``text``; empty if there is no text, or it makes no sense."""
    try:
        return {} if text is None else build(json.loads(text))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
