"""Short texts that users of the store keep beside the chunks."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Collection
from typing import Any

from sglang_hcache.store.format.state import read_value

_MOST = 1000
"""They are part of the state, which is written as a whole."""


class Notes:
    """Written into the state within a moment; lost if the state is lost. Thread-safe.

    Args:
        text: what :meth:`to_json` gave an earlier process.
        every_s: what changes so soon after a text was made waits, unless it is asked for anew.
    """

    def __init__(self, text: str | None, every_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._texts = read_value(text, _texts_of)
        self._every_s = every_s
        self._json, self._until = json.dumps(self._texts), -math.inf
        self._is_changed = False

    def get(self, name: str) -> str | None:
        """What was last put there, also by an earlier process."""
        return self._texts.get(name)

    def put(self, name: str, text: str) -> None:
        """Keep ``text``, in place of what was put there longest ago if there are too many."""
        with self._lock:
            self._texts.pop(name, None)
            if len(self._texts) >= _MOST:
                del self._texts[next(iter(self._texts))]
            self._texts[name] = text
            self._is_changed = True

    def drop(self, names: Collection[str]) -> None:
        """Keep them no more."""
        with self._lock:
            self._texts = {key: kept for key, kept in self._texts.items() if key not in names}
            self._is_changed = True

    def to_json(self, *, anew: bool = False) -> str:
        """All of them."""
        now = time.monotonic()
        with self._lock:
            if not self._is_changed or (now < self._until and not anew):
                return self._json
            texts, self._is_changed = dict(self._texts), False
        self._json, self._until = json.dumps(texts), now + self._every_s
        return self._json


def _texts_of(found: dict[Any, Any]) -> dict[str, str]:
    return {name: note for name, note in found.items() if isinstance(note, str)}
