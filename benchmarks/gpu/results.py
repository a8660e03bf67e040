"""How a part says what it finds: lines of its standard output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[[str, dict[str, Any]], None]
"""Receives the name of a result, and the result."""
_MARK = "RESULT "


def told(name: str, found: dict[str, Any]) -> str:
    """A result as a line."""
    return _MARK + json.dumps({"name": name, **found})


def read(output: Path) -> list[tuple[str, dict[str, Any]]]:
    """The results in what a part has written so far."""
    found = []
    for line in output.read_text(errors="replace").splitlines(keepends=True):
        if line.startswith(_MARK) and line.endswith("\n"):
            data = json.loads(line[len(_MARK) :])
            found.append((data.pop("name"), data))
    return found
