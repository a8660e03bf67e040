"""Copies of a pass's rows into the host tier's slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from sglang_hcache.capture.copiers import Copiers
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.tier.host import HostTier

_WORTH_SHARING_BYTES = 4 * 2**20
"""Single rows, for each thread that copies: to hand work to others takes a tenth of a millisecond, and more where the
interpreter is busy."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """What a forward pass brings.

    Args:
        tokens: of its rows.
        count: rows that were not dropped, the first ones.
        groups: those rows, group by group of the layout: (layers, count, row bytes).
        why_dropped: the counter of chunks that lack the other rows.
    """

    tokens: array[int]
    count: int
    groups: list[npt.NDArray[np.uint8]]
    why_dropped: str


@dataclass(slots=True)
class SingleRows:
    """Rows of a pass that each go to a chunk of their own."""

    rows: list[int] = field(default_factory=list)
    """Of the pass, ascending."""
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Rows of the chunk."""

    def add(self, row: int, slot: int, place: int) -> None:
        """A row of the pass goes to row ``place`` of the chunk in ``slot``."""
        self.rows.append(row)
        self.slots.append(slot)
        self.places.append(place)


class ChunkRows:
    """Writes rows into open slots. One thread calls it.

    Args:
        copiers: copy what is large; closed with this.
    """

    def __init__(self, host: HostTier, copiers: Copiers) -> None:
        self._copiers = copiers
        self._chunks = _chunk_groups(host)
        self._row_bytes = sum(host.layout.row_bytes)

    def close(self) -> None:
        """The threads beside the caller end."""
        self._copiers.close()

    def copy(self, taken: PassRows, slot: int, first: int, place: int, count: int) -> None:
        """Rows [first, first + count) of the pass to rows [place, place + count) of a chunk."""
        for chunks, rows in zip(self._chunks, taken.groups, strict=True):
            chunks[slot, :, place : place + count] = rows[:, first : first + count]

    def copy_beginning(self, source: int, slot: int, count: int) -> None:
        """The first rows of another slot."""
        for chunks in self._chunks:
            chunks[slot, :, :count] = chunks[source, :, :count]

    def carry_out(self, copies: Sequence[Callable[[], None]]) -> None:
        """Calls of :meth:`copy`, in any order. At the end none is under way, also after an error, which is raised."""
        self._copiers.carry_out(copies)

    def copy_singles(self, taken: PassRows, singles: SingleRows) -> None:
        """All of ``singles`` by few calls: after each, the interpreter is to be got back from the forward pass."""
        if not singles.rows:
            return
        shares = len(singles.rows) * self._row_bytes // _WORTH_SHARING_BYTES
        parts = max(1, min(self._copiers.count, shares))
        index = [np.array(each) for each in (singles.rows, singles.slots, singles.places)]
        split = [np.array_split(each, parts) for each in index]
        self._copiers.carry_out([partial(self._copy_part, taken, *part) for part in zip(*split, strict=True)])

    def _copy_part(
        self,
        taken: PassRows,
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        first, end = int(rows[0]), int(rows[-1]) + 1
        # A slice is a view; rows that are picked one by one are copied once more.
        picked = slice(first, end) if end - first == len(rows) else rows
        for chunks, source in zip(self._chunks, taken.groups, strict=True):
            chunks[slots, :, places] = source[:, picked].swapaxes(0, 1)


def _chunk_groups(host: HostTier) -> list[npt.NDArray[np.uint8]]:
    """Views of the host tier's slots, one a group of layers: (slots, layers, 64, row bytes).

    Of bytes: a copy of one row takes NumPy a tenth of what it takes torch, and the interpreter is the forward pass's.
    """
    views = []
    for group in host.layout.groups:
        rows = host.layers(group.first, group.count)
        views.append(rows.reshape(group.count, host.num_slots, CHUNK_TOKENS, -1).transpose(1, 0, 2, 3))
    return views
