"""Named values of the index: JSON, of which what makes no sense counts as nothing (docs/store-format.md, "Index")."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def read_value(text: str | None, build: Callable[[Any], T], nothing: T) -> T:
    """What ``build`` makes of the JSON in ``text``; ``nothing`` if there is no text, or it makes no sense."""
    try:
        return nothing if text is None else build(json.loads(text))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return nothing
