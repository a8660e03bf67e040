"""Short texts that users of the store keep beside the chunks."""

from __future__ import annotations

import json
from typing import Any

from sglang_hcache.store.format.values import read_value


class Notes:
    """Written into the index within a moment; lost if the index is lost. Thread-safe.

    Args:
        text: what :meth:`to_json` gave an earlier process.
    """

    def __init__(self, text: str | None) -> None:
        self._texts = read_value(text, _texts_of)

    def get(self, name: str) -> str | None:
        """What was last put there, also by an earlier process."""
        return self._texts.get(name)

    def put(self, name: str, text: str) -> None:
        """Keep ``text``."""
        self._texts = {**self._texts, name: text}  # anew, for the keeper may be writing the other one down

    def to_json(self) -> str:
        """All of them."""
        return json.dumps(self._texts)


def _texts_of(found: dict[Any, Any]) -> dict[str, str]:
    return {name: note for name, note in found.items() if isinstance(note, str)}
