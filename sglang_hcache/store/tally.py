"""Counts since the store was created: what ``hcache store stat`` shows, whoever runs the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_hcache.core.observer import Counters, Observer
from sglang_hcache.store.config import DirectoryStats
from sglang_hcache.store.format.state import built
from sglang_hcache.store.volumes.health import Condition
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

    def resume(self, found: Any) -> None:
        """Add what an earlier :meth:`snapshot` said."""
        for event, amount in built(_amounts_of, found).items():
            self._counters.count(event, amount)

    def totals(self) -> dict[str, int]:
        """By event, without the leading ``store.``."""
        return {event.removeprefix(_KEPT): amount for event, amount in self._counters.snapshot().items()}

    def snapshot(self) -> dict[str, int]:
        return self._counters.snapshot()


def _amounts_of(found: dict[Any, Any]) -> dict[str, int]:
    return {str(event): int(amount) for event, amount in found.items()}


def stats_of(volumes: Sequence[Volume]) -> tuple[DirectoryStats, ...]:
    """Each directory as it is now."""
    return tuple(
        DirectoryStats(volume.path, *told) for volume, told in zip(volumes, told_by(volumes), strict=True)
    )


def told_by(volumes: Sequence[Volume]) -> list[list[Any]]:
    """Condition, reason, corrupt extents and I/O errors of each directory, for the state."""
    return [
        [str(item.health.condition), item.reason, item.health.corrupt_extents, item.health.io_errors]
        for item in volumes
    ]


def told_in(meta: Mapping[str, Any]) -> dict[int, tuple[str, str, int, int]]:
    """What :func:`told_by` said, by stripe."""
    return built(_told_of, meta.get("directories"))


def _told_of(found: list[Any]) -> dict[int, tuple[str, str, int, int]]:
    return {
        stripe: (str(Condition(name)), str(reason), int(corrupt), int(errors))
        for stripe, (name, reason, corrupt, errors) in enumerate(found)
    }
