"""The processes that serve one model together (``--tp-size``), one a device.

SGLang runs a scheduler in each of them. They see the same requests in the same order, and each draws the same
conclusions: batches have to be the same. So whatever the tier lets the schedulers see must be so too: which request
waits, and which slots are in the tree. What a rank finds out by itself (what its tier holds, how a restore ended, what
time it is) becomes a conclusion only once all ranks have agreed on it here.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from sglang_hcache.core.errors import HCacheError

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class RanksDifferError(HCacheError):
    """Ranks are not in the same state: their batches would not be the same either."""


class Ranks(Protocol):
    """All of them call the same methods in the same order, on the scheduler's thread."""

    rank: int
    """This process's number, from 0 on."""
    size: int

    def minimum(self, *values: float) -> tuple[float, ...]:
        """Element-wise minimum over ranks (AND for booleans)."""

    def from_first(self, value: _Value) -> _Value:
        """The value of rank 0; those of the others do not matter."""

    def all_of(self, value: _Value) -> list[_Value]:
        """The value of each rank, in order."""

    def sync(self, **state: float) -> None:
        """Set the clock by that of rank 0.

        Args:
            state: names and numbers that should be the same on all.

        Raises:
            RanksDifferError: they are not.
        """

    def now(self) -> float:
        """Seconds by a clock that shows the same on all ranks; that of several stands still until :meth:`sync`."""


class Alone:
    """One process: what it finds is so."""

    rank, size = 0, 1

    def minimum(self, *values: float) -> tuple[float, ...]:
        return values

    def from_first(self, value: _Value) -> _Value:
        return value

    def all_of(self, value: _Value) -> list[_Value]:
        return [value]

    def sync(self, **state: float) -> None: ...

    def now(self) -> float:
        return time.monotonic()


class Together:
    """Several, which speak over torch's process group.

    Args:
        group: of all ranks, for tensors on the CPU, and for nobody else: a message of SGLang's is never taken for one
            of ours.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._root = distributed.get_global_rank(group, 0)
        self._now = 0.0
        self.sync()

    def minimum(self, *values: float) -> tuple[float, ...]:
        if not values:
            return ()
        found = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._group)
        return tuple(found.tolist())

    def from_first(self, value: _Value) -> _Value:
        message = [value]
        distributed.broadcast_object_list(message, self._root, group=self._group)
        return message[0]

    def all_of(self, value: _Value) -> list[_Value]:
        values = [value] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def sync(self, **state: float) -> None:
        told = torch.tensor([time.monotonic(), *state.values()], dtype=torch.float64)
        distributed.broadcast(told, self._root, group=self._group)
        self._now, *numbers = told.tolist()
        expected = dict(zip(state, numbers, strict=True))
        if expected != state:
            error = RanksDifferError(f"rank {self.rank} of {self.size} has {state}, rank 0 {expected}")
            logger.error("hcache: error: %s; the server ends, for their batches would differ", error)
            raise error

    def now(self) -> float:
        return self._now
