"""Slots of the KV pool that restores may take."""

from __future__ import annotations

import torch

from sglang_hcache.sglang_plugin.seam.protocols import DeviceMatch, DeviceTree, SchedulerView
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.waiting import Waiting

_MOST_HELD = 0.5
"""Share of the pool that restores and pins may hold together; one restore may always run alone."""


class Room:
    """Within our share of the pool, and not those that other requests will need. For the scheduler's thread."""

    def __init__(
        self, tree: DeviceTree, scheduler: SchedulerView, running: Running, waiting: Waiting
    ) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self._running = running
        self._waiting = waiting
        self._reserved = 0

    def look(self) -> None:
        """What running requests need may have changed: before restores start."""
        self._reserved = self._scheduler.reserved_tokens()

    @property
    def held_tokens(self) -> int:
        """Slots that restores fill, or have filled for requests that still wait."""
        return self._running.tokens + self._waiting.pinned_tokens

    @property
    def left(self) -> int:
        """Slots that are not needed by running requests."""
        return self._tree.room() - self._reserved

    def has(self, count: int, ahead: int) -> bool:
        """Whether ``count`` slots may be taken, with ``ahead`` left for requests that come first in the queue."""
        held = self.held_tokens
        if held and held + count > _MOST_HELD * self._tree.capacity():
            return False
        return self.is_left(count + ahead)

    def is_left(self, count: int) -> bool:
        """Whether ``count`` slots are not needed by running requests."""
        return self.left >= count

    def take(self, match: DeviceMatch, count: int, ahead: int) -> torch.Tensor | None:
        """``count`` slots behind ``match``, which is locked then; None if there is no room."""
        self._tree.lock(match.node)  # first, for what is locked is no room
        slots = self._tree.allocate(count) if self.has(count, ahead) else None
        if slots is None:
            self._tree.unlock(match.node)
        return slots
