"""What users of the store keep beside the chunks."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from sglang_hcache.store.format.state import built

_MOST = 1000
"""They are part of the state, which is written as a whole."""


class Notes:
    """Each a few named texts; written into the state within a moment, and lost if the state is lost. Thread-safe.

    Args:
        found: what :meth:`all` gave an earlier process.
    """

    def __init__(self, found: Any) -> None:
        self._lock = threading.Lock()
        self._notes = built(_notes_of, found)

    def get(self, name: str) -> Mapping[str, str]:
        """What was last put there, also by an earlier process."""
        return self._notes.get(name, {})

    def put(self, name: str, note: Mapping[str, str]) -> None:
        """Keep ``note``, in place of what was put there longest ago if there are too many."""
        with self._lock:
            self._notes.pop(name, None)
            if len(self._notes) >= _MOST:
                del self._notes[next(iter(self._notes))]
            self._notes[name] = dict(note)

    def drop(self, names: Collection[str]) -> None:
        """Keep them no more."""
        with self._lock:
            self._notes = {key: kept for key, kept in self._notes.items() if key not in names}

    def all(self) -> dict[str, dict[str, str]]:
        with self._lock:
            return dict(self._notes)


def _notes_of(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {
        name: {key: str(text) for key, text in note.items()}
        for name, note in found.items()
        if isinstance(note, dict)
    }
