"""Counts since the store was created: what ``hcache store stat`` shows, whoever runs the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_hcache.core.observer import Counters, Observer
from sglang_hcache.store.config import DirectoryStats
from sglang_hcache.store.format.state import read_value
from sglang_hcache.store.volumes.volume import Volume

_KEPT = "store."
_TRAFFIC = frozenset({"store.chunks_read", "store.bytes_read", "store.chunks_written", "store.bytes_written"})


class Tally:
    """An ``Observer`` that passes on what it counts, and adds up the store's events across restarts."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._counters = Counters()
        self.is_measuring = False
        """Whether what is read and written is of chunks that nobody asked for."""

    def count(self, event: str, amount: int = 1) -> None:
        if self.is_measuring and event in _TRAFFIC:
            return
        if event.startswith(_KEPT):
            self._counters.count(event, amount)
        self._observer.count(event, amount)

    def observe(self, measure: str, value: float) -> None:
        self._observer.observe(measure, value)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Reads and writes meanwhile are not counted, nor do they use the write budget up."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False

    def resume(self, text: str | None) -> None:
        """Add what an earlier :meth:`to_json` said."""
        for event, amount in read_value(text, _amounts_of).items():
            self._counters.count(event, amount)

    def totals(self) -> dict[str, int]:
        """By event, without the leading ``store.``."""
        return {event.removeprefix(_KEPT): amount for event, amount in self._counters.snapshot().items()}

    def to_json(self) -> str:
        return json.dumps(self._counters.snapshot())


def _amounts_of(found: dict[Any, Any]) -> dict[str, int]:
    return {str(event): int(amount) for event, amount in found.items()}


def stats_of(volumes: Sequence[Volume]) -> tuple[DirectoryStats, ...]:
    """Each directory as it is now."""
    return tuple(
        DirectoryStats(
            volume.path,
            str(volume.health.condition),
            volume.reason,
            volume.health.corrupt_extents,
            volume.health.io_errors,
        )
        for volume in volumes
    )


def resume_errors(volumes: Sequence[Volume], meta: Mapping[str, str]) -> None:
    """Add what an earlier :func:`errors_to_json` said."""
    errors = errors_of(meta)
    for volume in volumes:
        corrupt_extents, io_errors = errors.get(volume.stripe, (0, 0))
        volume.health.corrupt_extents += corrupt_extents
        volume.health.io_errors += io_errors


def errors_to_json(volumes: Sequence[Volume]) -> str:
    """Damage and errors of each directory, for the state."""
    return json.dumps([[volume.health.corrupt_extents, volume.health.io_errors] for volume in volumes])


def errors_of(meta: Mapping[str, str]) -> dict[int, tuple[int, int]]:
    """What :func:`errors_to_json` said, by stripe: corrupt extents, I/O errors."""
    return read_value(meta.get("directory_errors"), _errors_of)


def _errors_of(found: list[Any]) -> dict[int, tuple[int, int]]:
    return {stripe: (int(corrupt), int(errors)) for stripe, (corrupt, errors) in enumerate(found)}
