"""Short texts that users of the store keep beside the chunks."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import Any

from sglang_hcache.store.format.values import read_value

_MOST = 1000
"""They are written as one text whenever one changes."""


class Notes:
    """Written into the index within a moment; lost if the index is lost. Thread-safe.

    Args:
        text: what :meth:`to_json` gave an earlier process.
    """

    def __init__(self, text: str | None) -> None:
        self._lock = threading.Lock()
        self._texts = read_value(text, _texts_of)

    def get(self, name: str) -> str | None:
        """What was last put there, also by an earlier process."""
        return self._texts.get(name)

    def put(self, name: str, text: str) -> None:
        """Keep ``text``, in place of what was put there longest ago if there are too many."""
        with self._lock:
            texts = {key: kept for key, kept in self._texts.items() if key != name}
            if len(texts) >= _MOST:
                del texts[next(iter(texts))]
            self._texts = {**texts, name: text}  # anew, for the keeper may be writing the other one down

    def drop(self, names: Collection[str]) -> None:
        """Keep them no more."""
        with self._lock:
            self._texts = {key: kept for key, kept in self._texts.items() if key not in names}

    def to_json(self) -> str:
        """All of them."""
        return json.dumps(self._texts)


def _texts_of(found: dict[Any, Any]) -> dict[str, str]:
    return {name: note for name, note in found.items() if isinstance(note, str)}
