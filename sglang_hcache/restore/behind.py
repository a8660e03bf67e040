"""Forward passes behind a restore that the device has not ended yet: they wait for what it writes, and not longer.

A pass that prefills attends layer by layer, and says which layer it reads next just before it asks the device for that.
So it waits for one layer after the other, and the device computes its first layers while later ones are restored. ::

    restore | layer 0 | layer 1 | layer 2 | ...
    pass              | layer 0 | layer 1 | layer 2 | ...

Other passes, such as one that a CUDA graph replays as a whole, wait for all of it. Nobody may use the slots meanwhile
but passes that wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from sglang_hcache.device.streams import Mark

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """When the device has written K and V of a restore."""

    all: Mark
    layers: Mapping[int, Mark] = field(default_factory=dict)
    """Layer -> when it has written that one; empty: nobody may go by layers."""

    def as_a_whole(self) -> Written:
        """The same, for passes that may not read a layer before all of them are there."""
        return replace(self, layers={})


class PassesBehind:
    """Used on the thread that asks for forward passes.

    Whether a pass says what it reads is up to SGLang's attention backend. So the first one behind a restore waits for
    all of it, and is watched; if it has named each layer, the following ones go by layers.

    Args:
        hold_up: lets the calling thread's own work go on behind a mark only.
    """

    def __init__(self, hold_up: Callable[[Mark], object]) -> None:
        self._hold_up = hold_up
        self._written: Written | None = None
        """What passes come behind; None: nothing."""
        self._go_by_layers = False
        """Whether passes that prefill may."""
        self._named: set[int] | None = None
        """The layers of which the pass has said that it reads them; None: nobody watches."""
        self._marks: Mapping[int, Mark] = {}
        """What the pass waits for, layer by layer."""

    def come_after(self, written: Written) -> None:
        """Passes compute only behind ``written`` from now on, and so behind the restores before it."""
        before = self._awaited()
        is_whole = before is not None and not before.layers
        self._written = written.as_a_whole() if is_whole else written

    def begin(self) -> None:
        """A pass is asked for next that waits for all.

        Called then, and not earlier, when the restore becomes certain: preparing a pass copies numbers out of pageable
        memory, and for such a copy CUDA may block the thread until everything that was queued before is done.
        """
        if (written := self._awaited()) is not None:
            self._hold_up(written.all)

    @contextmanager
    def one_pass(self, *, prefills: bool) -> Iterator[bool]:
        """A pass of SGLang's is asked for inside.

        Args:
            prefills: whether it computes prompts, and so asks for attention outside of CUDA graphs.

        Yields:
            Whether it begins once all is written. Else it waits while it computes, so it takes longer than others.

        Raises:
            RuntimeError: it did not name each layer, as passes before it did. What it computes is worth nothing.
        """
        written = self._awaited() if prefills else None
        if written is None or not written.layers:
            self.begin()
            yield True
            return
        by_layers = self._go_by_layers
        if not by_layers:
            self._hold_up(written.all)
        self._named, self._marks = set(), written.layers if by_layers else {}
        try:
            yield not by_layers
            unnamed = written.layers.keys() - self._named
        finally:
            self._named, self._marks = None, {}
        if by_layers and unnamed:
            raise RuntimeError(
                f"hcache: a pass did not say that it reads layers {sorted(unnamed)}, which are being restored"
            )
        if not unnamed and not by_layers:
            logger.info(
                "hcache: prefills begin while a restore goes on: each layer waits for its own K and V"
            )
        self._go_by_layers = not unnamed

    def layer(self, number: int) -> None:
        """The pass reads K and V of this layer next."""
        if self._named is None or number in self._named:
            return
        self._named.add(number)
        if (mark := self._marks.get(number)) is not None:
            self._hold_up(mark)

    def _awaited(self) -> Written | None:
        """What passes come behind still."""
        if self._written is not None and self._written.all.is_reached():
            self._written = None
        return self._written
