"""What the directories say of a store beside its segments: superblocks, and a state that is written now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang_hcache.core.errors import StoreError, StoreIOError
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.format.state import SegmentState, State
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.volumes.opening import publish
from sglang_hcache.store.volumes.volume import Volume, in_each

_BYTES_PER_S = 2**16
"""What states take of a directory's writes at most, but for those that cannot wait."""
_MARKS_KEPT = 1000
"""Chunks in quarantine that are written down, those of the newest segments: others are found to be damaged again."""
_GOING_SHARE = 16
"""One in so many segments may be evicted before another state has to be written for that."""
_UNKNOWN = SegmentState()


class SavedState:
    """Safe from several threads. ``identity`` and ``outgrow`` do no I/O; the others may, and raise ``StoreError``."""

    def __init__(
        self,
        volumes: Sequence[Volume],
        identity: StoreIdentity,
        catalog: Catalog,
        state: State,
        unseen: Mapping[int, SegmentState],
    ) -> None:
        self._volumes = volumes
        self._catalog = catalog
        self._identity = self._published = identity
        self.unseen = dict(unseen)
        """What the state said of segments in directories that were out at the start: it says so until they are back."""
        self._state = state
        """As it was written last, ..."""
        self._tried = set[int]()
        """... and in which directories that was tried. A start writes it once: not every one may have it."""
        self._next_at = 0.0
        """When the next one may be written, by the monotonic clock."""
        self._lock = threading.RLock()

    @property
    def identity(self) -> StoreIdentity:
        """What the directories agree on."""
        return self._identity

    def settle(self) -> None:
        """Publish what no directory has taken yet."""
        with self._lock:
            if self._published != self._identity:
                self._publish()

    def save(self, meta: Mapping[str, Any], *, last: bool = False) -> None:
        """Write down what was used, what is quarantined, and ``meta``, if a directory has it not yet.

        Args:
            last: no file is deleted afterwards, and a state that somebody has deleted is written again.
        """
        with self._lock:
            if last:
                self._put(self._made(meta, ()))
            elif time.monotonic() >= self._next_at:
                self._save(meta, self._coldest())

    def save_everywhere(self, meta: Mapping[str, Any]) -> None:
        """The same at once, and no directory keeps an older state.

        Raises:
            StoreError: one does.
        """
        with self._lock:
            taken = self._put(self._made(meta, self._coldest()))
            for volume in self._volumes:
                if volume.stripe not in taken:
                    raise StoreIOError(f"{volume.path} keeps an older state: {volume.health.reason}")

    def announce(self, segments: Iterable[int]) -> None:
        """To be called before files are deleted or erased on purpose: who finds them gone after a kill knows why.

        Mostly the state that was written last names them already. Where none can be written, they go all the same.
        """
        with self._lock:
            known, first = self._state.segments, self._identity.first_segment
            going = {*segments}
            for number in going:
                self.unseen.pop(number, None)
            news = {number for number in going if number >= first and number in known and known[number].runs}
            news -= self._state.going
            if news:
                with contextlib.suppress(StoreError):
                    self._put(
                        replace(self._state, segments=self._used(), going=self._going(news | self._coldest()))
                    )

    def outgrow(self, other: StoreIdentity) -> None:
        """Let ours count from now on, and no segment that ``other`` cleared, in a directory that was not with us.

        A clearing counts whatever its epoch: ours may have grown by other things since.
        """
        with self._lock:
            ours = self._identity
            is_newer = other.epoch >= ours.epoch and other != ours
            if is_newer or other.first_segment > ours.first_segment:
                first_segment = max(ours.first_segment, other.first_segment)
                epoch = max(ours.epoch, other.epoch)
                self._identity = replace(ours, epoch=epoch).next(first_segment=first_segment)

    def void_before(self, segment: int) -> None:
        """From now on segments below this number count as cleared, whatever becomes of their files.

        Raises:
            StoreError: no directory takes the note of it now, so they would be back after a restart.
        """
        with self._lock:
            self._identity = self._identity.next(first_segment=segment)
            try:
                self._publish()
            except StoreError as error:
                healths = [(item.path, item.health) for item in self._volumes]
                sick = "; ".join(f"{path} is {health.condition}: {health.reason}" for path, health in healths)
                raise StoreIOError(
                    "no directory takes the note that all was cleared: after a restart the chunks on disk would be "
                    f"back. See to one of them ({sick}): {error}"
                ) from error

    def _used(self) -> dict[int, SegmentState]:
        """Segments as they are, but without runs that the last state does not have: nor are they in its ``written``."""
        last = self._state.segments
        return {
            number: replace(item, runs=min(item.runs, last.get(number, _UNKNOWN).runs))
            for number, item in self._segments().items()
        }

    def _segments(self) -> dict[int, SegmentState]:
        """Those that nobody can see count as used before all others."""
        found = self._catalog.segment_states()
        if all(volume.health.readable for volume in self._volumes):
            self.unseen.clear()
            return found
        first = self._identity.first_segment
        return {**{number: item for number, item in self.unseen.items() if number >= first}, **found}

    def _coldest(self) -> set[int]:
        """What is evicted next, enough to write a state only now and then for the sake of evictions."""
        return set(self._catalog.coldest(_GOING_SHARE))

    def _save(self, meta: Mapping[str, Any], going: Collection[int]) -> None:
        state = self._made(meta, going)
        targets = {volume.stripe for volume in self._targets()}
        self._tried &= targets
        # Dicts are equal whatever the order of their keys, which is that of use.
        is_same = state == self._state and [*state.segments] == [*self._state.segments]
        if not is_same or self._tried != targets:
            self._put(state)

    def _made(self, meta: Mapping[str, Any], going: Collection[int]) -> State:
        """As it is now, with the serial number of the last one."""
        marks, segments = self._catalog.quarantined(_MARKS_KEPT), self._segments()
        store_id, serial = self._identity.store_id, self._state.serial
        return State(store_id, serial, segments, self._going(going), marks, dict(meta))

    def _going(self, here: Collection[int]) -> frozenset[int]:
        """With those that may be gone already, where nobody can look."""
        return frozenset(here) | (self.unseen.keys() & self._state.going)

    def _targets(self) -> list[Volume]:
        """A small file finds room where a segment does not."""
        return [volume for volume in self._volumes if volume.health.can_delete]

    def _put(self, state: State) -> set[int]:
        """Write it down; returns in which directories. Raises StoreError: in none."""
        state = replace(state, serial=self._state.serial + 1)
        text = state.to_bytes()
        taken = in_each(
            self._targets(), lambda volume: volume.directory.write_state(text), "cannot write the state"
        )
        self._tried = {volume.stripe for volume in self._targets()} | taken
        self._state = state
        self._next_at = time.monotonic() + len(text) / _BYTES_PER_S
        return taken

    def _publish(self) -> None:
        publish(self._volumes, self._identity)
        self._published = self._identity
