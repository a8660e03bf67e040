"""The free slots of the host tier, given out so that the chunks of a prefix become neighbours.

Slots are in groups of a few neighbours. A prefix takes the slot behind its last one, else the first of a group that is
free as a whole, and only where there is none any other. Without that, slots that are freed and taken by many
conversations in turn have no two chunks of a prefix side by side before long, and each is a copy of its own.
"""

from __future__ import annotations

import heapq


class FreeSlots:
    """Which of ``num_slots`` are free; all at first. Not thread-safe.

    Args:
        group_slots: of a group.
    """

    def __init__(self, num_slots: int, group_slots: int) -> None:
        self.group_slots = group_slots
        self._num_slots = num_slots
        self._free = set[int]()
        self._free_of = [0] * -(-num_slots // self.group_slots)
        self._whole: list[int] = []  # a heap of groups, each once; may hold some that were begun since
        self._listed = set[int]()  # what is in it
        for slot in range(num_slots):
            self.add(slot)

    def __len__(self) -> int:
        return len(self._free)

    def add(self, slot: int) -> None:
        """It is free now."""
        self._free.add(slot)
        group = slot // self.group_slots
        self._free_of[group] += 1
        if self._is_whole(group) and group not in self._listed:
            heapq.heappush(self._whole, group)
            self._listed.add(group)

    def take_behind(self, slot: int | None) -> int | None:
        """The next one after ``slot``, if it is free."""
        return self._taken(slot + 1) if slot is not None and slot + 1 in self._free else None

    def take_group(self) -> int | None:
        """The first of the first group that is free as a whole."""
        while self._whole:
            group = heapq.heappop(self._whole)
            self._listed.discard(group)
            if self._is_whole(group):
                return self._taken(group * self.group_slots)
        return None

    def take_any(self) -> int | None:
        """One of a group that was begun."""
        # pop() goes on where it was; the first one is looked for behind all that were taken.
        return self._taken(self._free.pop()) if self._free else None

    @property
    def has_group(self) -> bool:
        """Whether there is one that is free as a whole."""
        while self._whole and not self._is_whole(self._whole[0]):
            self._listed.discard(heapq.heappop(self._whole))
        return bool(self._whole)

    def group_of(self, slot: int) -> range:
        """The slots of its group."""
        first = slot - slot % self.group_slots
        return range(first, min(first + self.group_slots, self._num_slots))

    def _is_whole(self, group: int) -> bool:
        return self._free_of[group] == len(self.group_of(group * self.group_slots))

    def _taken(self, slot: int) -> int:
        self._free.discard(slot)
        self._free_of[slot // self.group_slots] -= 1
        return slot
