"""What an operator has to do something about, by a server's state; for ``hcache top`` and ``hcache chat``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_hcache.core.metrics import events_of

ERRORS = tuple(events_of("errors"))
_WHY_NOTHING_IS_SAVED = {
    "old_weights": "nothing is saved: KV of earlier weights is on the device (POST /flush_cache)",
    "switched_off": "switched off: nothing is saved or restored (PUT /hicache/storage-backend)",
}
"""But for ``method``, which is what was asked for."""


def directory_text(directory: Mapping[str, Any]) -> str:
    """How it is, and why."""
    reason = f": {directory['reason']}" if directory["reason"] else ""
    return f"{directory['path']}: {directory['condition']}{reason}"


def directory_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """One line for each directory of the disk tier that is not healthy, or stores nothing new."""
    directories = state["disk"]["directories"] if state["disk"] else ()
    yield from (directory_text(directory) for directory in directories if not directory["takes_writes"])


def other_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """All others, a line each."""
    if state["nothing_saved"] in _WHY_NOTHING_IS_SAVED:
        yield _WHY_NOTHING_IS_SAVED[state["nothing_saved"]]
    if state["disk"] and state["disk"]["clearing_pending"]:
        yield "what was cleared would be back after a restart: no directory took the note"
    errors = {where: state["counters"].get(event, 0) for event, where in events_of("errors").items()}
    told = ", ".join(f"{count:,} in {where}" for where, count in errors.items() if count)
    if told:
        yield f"unexpected errors since the start: {told}; the log has them, please report"
