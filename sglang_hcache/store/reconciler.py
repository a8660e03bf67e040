"""A directory is back: what of its files is still of use."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.removal import Remover
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.volume import MEASURE_S, Volume

logger = logging.getLogger(__name__)


def compare(
    volume: Volume,
    volumes: Sequence[Volume],
    catalog: Catalog,
    saved: SavedState,
    remover: Remover,
    observer: Observer,
) -> int:
    """Segments that lost their file in ``volume`` or were cleared go; files of no segment are the remover's.

    ``Space`` holds its lock. A segment that nobody has seen stays, unread, until its room is needed: the next start
    finds its runs.

    Returns:
        The highest number of a segment there.

    Raises:
        StoreError, OSError: it fails again.
    """
    files = volume.attempt(volume.directory.segment_files, MEASURE_S)
    first = saved.identity.first_segment
    segments = catalog.segments()
    lost = {segment for segment in segments if segment.number < first}
    for segment in segments:
        if volume.stripe in segment.members:
            segment.forget_files()
            file = files.get(segment.number)
            if file is None or file.size < segment.used[volume.stripe]:
                lost.add(segment)
    remover.announce(segment.number for segment in lost)  # at once: each time a state is written
    for segment in segments:
        if segment in lost:
            observer.count("store.runs_lost", len(segment.runs))
            remover.retire(segment)
        elif volume.stripe in segment.members:
            segment.note(volume.stripe, files[segment.number])
            if segment.is_unread:
                segment.used[volume.stripe] = files[segment.number].size
    left = catalog.segments()
    known = [*left, *remover.leftovers]
    expected = {item.number for item in known if item.left >> volume.stripe & 1}
    unseen = {number for number in files.keys() - {item.number for item in known} if number >= first}
    # A start that can read it may need this file, too.
    unread = {item.number: item for item in left if item.is_unread}
    found = {number: _unread(number, volumes, files[number].size, saved) for number in sorted(unseen)}
    catalog.add_unread(found.values())
    unread |= found
    for number in sorted(files.keys() - expected):
        if number in unread:
            unread[number].join(volume.stripe, files[number])
        else:
            remover.remember_stray(volume.stripe, number, files[number])
    if unseen:
        logger.warning(
            "hcache: %d segments in %s were not there at the start: the next start serves what only they hold",
            len(unseen),
            volume.path,
        )
    return max([first - 1, *files])


def _unread(number: int, volumes: Sequence[Volume], file_bytes: int, saved: SavedState) -> Segment:
    segment = Segment(number, volumes, (), file_bytes)
    segment.is_unread = True
    if known := saved.unseen.get(number):
        segment.score, segment.unread_runs = known.score, known.runs
    return segment
