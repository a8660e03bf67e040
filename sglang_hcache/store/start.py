"""What happens at start: find the runs by their headers, keep what the files bear out, reclaim the rest."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_hcache.core.errors import StoreError, StoreIOError
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.census import Files, is_served, lost_runs, segments_of
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.names import STATE_NAME
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.format.state import SegmentState, State
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.volume import Volume

_UNSEEN_SEGMENTS = 2**20
"""More than a directory holds that is out: new segments must not get the numbers of files that nobody has seen, nor
those of a start that misses another directory."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What :func:`begin` found."""

    saved: SavedState
    catalog: Catalog
    """Holds the runs, but not yet the segments: ``Space.adopt`` adds them."""
    segments: dict[int, Segment]
    """By number, in order of use."""
    files: Files
    """Those of no segment are to be deleted."""
    next_number: int
    meta: Mapping[str, Any]
    """Named values of the state."""
    unsaved_bytes: Mapping[float, int]
    """What was written after the state, by time (seconds since 1970)."""


def begin(
    config: StoreConfig, volumes: Sequence[Volume], identity: StoreIdentity, observer: Observer
) -> Start:
    """Bring memory and files into agreement; deletes no files.

    Raises:
        StoreIOError: no directory can be read: whatever is there would be taken for files of no run.
        OSError: this process lacks something.
    """
    catalog = Catalog(config.cost_doubling_tokens)
    listed = Files.listed(identity.first_segment, volumes)
    contents = listed.read(volumes)
    files, places = contents.files, contents.runs
    state, problems = read_state(volumes, identity.store_id)
    for problem in problems.values():
        logger.warning("hcache: %s; it does not count", problem)
    if places and not state.serial:
        logger.warning(
            "hcache: there is no %s: what was used, counted and in quarantine is forgotten", STATE_NAME
        )
    if not any(volume.health.readable for volume in volumes):
        raise StoreIOError(
            f"cannot use {volumes[0].path} (--hcache-dirs): {volumes[0].health.reason}; nothing was changed, start "
            "again when its disk answers"
        )
    segments = segments_of(contents, state, volumes, catalog, config.file_bytes)
    observer.count("store.runs_recovered", len(places))
    if contents.unread:
        logger.warning(
            "hcache: %d segments cannot be read now; they stay until room is needed", len(contents.unread)
        )
    lost = sum(lost_runs(state, contents).values())
    if lost:
        logger.warning("hcache: %d stored runs lost their files or headers and are forgotten", lost)
        observer.count("store.runs_lost", lost)
    unseen = {number: known for number, known in state.segments.items() if files.may_be_out(number)}
    highest = max([*listed.numbers(), *state.segments, identity.first_segment - 1])
    return Start(
        saved=SavedState(volumes, identity, catalog, state, unseen),
        catalog=catalog,
        segments=segments,
        files=files,
        next_number=_next_number(highest, files),
        meta=state.meta,
        unsaved_bytes=_unsaved(state, files, places),
    )


def read_state(volumes: Sequence[Volume], store_id: str) -> tuple[State, dict[int, str]]:
    """The newest that a directory has, nothing is known if none has one; and what is wrong with others, by stripe.

    What another copy does not list counts as ``going``.
    """
    found, problems = [State()], {}
    for volume in volumes:
        if volume.health.readable:
            path = volume.path / STATE_NAME
            try:
                text = volume.call(volume.directory.read_state, f"{path} cannot be read")
                state = State() if text is None else State.from_bytes(text)
                if state.serial and state.store_id != store_id:
                    raise ValueError("it is of another store")
                found.append(state)
            except StoreError as error:
                problems[volume.stripe] = str(error)
            except ValueError as error:
                problems[volume.stripe] = f"{path} cannot be used: {error}"
    newest = max(found, key=lambda state: state.serial)
    # Where each directory was used without the other, what one of them let go is not lost.
    copies = [state.segments.keys() for state in found if state.serial]
    going = newest.going.union(*(newest.segments.keys() - segments for segments in copies))
    return replace(newest, going=going), problems


def _next_number(highest: int, files: Files) -> int:
    """Of a segment: none that one in a directory that is out may have, nor a start that misses another directory."""
    if files.is_all:
        return highest + 1
    numbers = _UNSEEN_SEGMENTS * (len(files.found) + 1)
    return (highest // numbers + 1) * numbers + _UNSEEN_SEGMENTS * (1 + files.found.index(None))


def _unsaved(state: State, files: Files, places: Sequence[RunPlace]) -> dict[float, int]:
    """Bytes of runs that the state does not know, by the time of their segment's last write.

    A segment older than those it knows was in a directory that was out: its bytes were counted when they were written,
    though not in this state if each directory was used without the other.
    """
    newest = max(state.segments, default=-1)
    sizes: dict[int, list[int]] = defaultdict(list)
    for place in places:
        is_known = place.segment in state.segments or place.segment > newest
        if is_known and is_served(state, place):
            sizes[place.segment].append(place.shape.disk_bytes)
    found: dict[float, int] = defaultdict(int)
    for number, of_runs in sizes.items():
        known = state.segments.get(number, SegmentState()).runs
        found[files.written_s(number)] += sum(of_runs[known:])
    return {written_s: size for written_s, size in found.items() if size}
