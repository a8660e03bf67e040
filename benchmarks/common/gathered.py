"""The results of a command, put together while they come: a run that is ended early has those that were there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class Gathered:
    """Rows of what a command sets out to measure. Each thing's rows are there as a whole, or it is missing."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        """What the results begin with."""
        self._began = time.monotonic()
        self._sections: dict[str, str] = {}
        self._found: dict[str, tuple[Sequence[Row], Sequence[str]]] = {}

    def expect(self, names: Iterable[str], section: str = "rows") -> None:
        """What will be measured, in the order of the results.

        Args:
            section: the field of the results that gets the rows.
        """
        self._sections |= dict.fromkeys(names, section)

    def leave_out(self, name: str) -> None:
        """It will not be measured, and is not missing."""
        del self._sections[name]

    def add(self, name: str, rows: Sequence[Row], *, lacks: Sequence[str] = ()) -> None:
        """What was measured of ``name``, in place of what was added before.

        Args:
            lacks: parts of it that are not measured yet.
        """
        assert name in self._sections
        self._found[name] = rows, lacks  # one step: a signal comes before or after it

    @property
    def measured(self) -> list[str]:
        """Names of what has rows."""
        return [name for name in self._sections if name in self._found]

    @property
    def missing(self) -> list[str]:
        """Names of what is not measured, or the names and what is missing of them."""
        missing = []
        for name in self._sections:
            lacks = self._found[name][1] if name in self._found else None
            if lacks is None:
                missing.append(name)
            elif lacks:
                missing.append(f"{name}: {', '.join(lacks)}")
        return missing

    def head(self) -> dict[str, Any]:
        """The header, with the seconds that it all took, whether it is complete, and what is missing."""
        missing = self.missing
        seconds = time.monotonic() - self._began
        return {**self.header, "seconds": seconds, "complete": not missing, "missing": missing}

    def results(self) -> dict[str, Any]:
        """The header and the rows, as JSON has them; ``unequal`` is the sum of the rows' numbers of wrong answers."""
        sections: dict[str, list[Row]] = {}
        for name in self.measured:
            sections.setdefault(self._sections[name], []).extend(self._found[name][0])
        answers = [row for rows in sections.values() for row in rows if "unequal" in row]
        return {**self.head(), **({"unequal": count_unequal(answers)} if answers else {}), **sections}


def count_unequal(rows: Iterable[Row]) -> int:
    """Answers that differ from those of the reference, in all rows."""
    return sum(row.get("unequal") or 0 for row in rows)
