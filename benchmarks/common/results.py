"""Files of results."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row. What is not a single value is left out: the JSON has it."""
    nested = {name for row in rows for name, value in row.items() if isinstance(value, list | dict)}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in nested]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
