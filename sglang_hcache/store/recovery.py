"""What happens at start: load or rebuild the index, keep what the files bear out, reclaim the rest."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sglang_hcache.core.errors import (
    CorruptExtentError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreIOError,
)
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.geometry import BLOCK, ShapeTable
from sglang_hcache.store.format.record import parse_header
from sglang_hcache.store.format.rows import IndexContents, Recency, RunRow
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.index import Index, batches, remove_index
from sglang_hcache.store.ledger import Ledger
from sglang_hcache.store.scan import scan_segments
from sglang_hcache.store.segments import RunPlace, Segment, StoredRun
from sglang_hcache.store.volumes.directory import INDEX_NAME, StoreDirectory
from sglang_hcache.store.volumes.opening import publish
from sglang_hcache.store.volumes.volume import Volume

LOAD_S = 60.0
"""For reading the whole index, which takes a second for 100,000 runs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What :func:`recover` found."""

    ledger: Ledger
    catalog: Catalog
    """Holds the runs, but not yet the segments: ``Space.adopt`` adds them."""
    segments: list[Segment]
    leftovers: list[Segment]
    """Files of no run: to be deleted."""
    next_number: int
    meta: dict[str, str]
    """Named values of the index."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Sizes of segment files by stripe and number; None for a directory that is out."""

    first_segment: int
    """Lower numbers were cleared."""
    sizes: list[dict[int, int] | None]

    def numbers(self) -> list[int]:
        return sorted({number for found in self.sizes if found is not None for number in found})

    def hold(self, place: RunPlace) -> bool:
        """Whether every part lies on the block grid inside its file, as far as files can be seen."""
        if place.segment < self.first_segment:
            return False
        for sizes, offset, size in zip(self.sizes, place.offsets, place.shape.part_bytes, strict=True):
            inside = sizes is None or offset + size <= sizes.get(place.segment, 0)
            if size and (offset % BLOCK or not inside):
                return False
        return True

    def strays(self, segments: Mapping[int, Segment]) -> dict[int, tuple[int, ...]]:
        """Files of no segment: the directories of each number."""
        found: dict[int, tuple[int, ...]] = {}
        for number in self.numbers():
            members = segments[number].members if number in segments else ()
            stripes = tuple(
                stripe
                for stripe, sizes in enumerate(self.sizes)
                if sizes is not None and number in sizes and stripe not in members
            )
            if stripes:
                found[number] = stripes
        return found


def recover(
    config: StoreConfig,
    volumes: Sequence[Volume],
    identity: StoreIdentity,
    observer: Observer,
    shapes: ShapeTable,
) -> Recovered:
    """Bring index, memory and files into agreement; deletes rows but no files.

    Raises:
        StoreError: no directory can be read.
    """
    files = _Files(identity.first_segment, [_sizes(volume) for volume in volumes])
    found, identity = _find_index(config, volumes, identity, files, observer)
    catalog = Catalog(config.cost_doubling_tokens)
    ledger = Ledger(found.index, volumes, identity, catalog, config)
    contents, meta = found.contents, found.meta
    segments: dict[int, Segment] = {}
    unusable = contents.bad_rows + [
        row.number
        for row in contents.runs
        if not _admit(row, contents, files, volumes, config, shapes, segments, catalog)
    ]
    if unusable:
        _log.warning("hcache: %d stored runs lost their files and are forgotten", len(unusable))
        observer.count("store.runs_lost", len(unusable))
    # What is said of no run would be said of the next one with its number.
    orphans = contents.quarantined.keys() - {row.number for row in contents.runs}
    _try_delete(ledger, [*unusable, *orphans])
    observer.count("store.runs_recovered", len(contents.runs) + len(contents.bad_rows) - len(unusable))
    _count_torn(volumes, files, segments, observer)
    leftovers = [
        Segment(number, volumes, stripes, config.file_bytes)
        for number, stripes in files.strays(segments).items()
    ]
    mentioned = [row.segment for row in contents.runs]
    highest = max([*files.numbers(), *mentioned, *contents.recency, identity.first_segment - 1])
    return Recovered(ledger, catalog, list(segments.values()), leftovers, highest + 1, meta)


def _sizes(volume: Volume) -> dict[int, int] | None:
    if not volume.health.readable:
        return None
    try:
        return volume.call(volume.directory.segment_sizes, "cannot list the segments")
    except StoreError as error:
        volume.health.take_out(str(error))
        return None


@dataclass(frozen=True, slots=True)
class _FoundIndex:
    index: Index | None
    """None if no directory takes writes: then the ledger makes one as soon as one does."""
    contents: IndexContents
    meta: dict[str, str]


def _find_index(
    config: StoreConfig,
    volumes: Sequence[Volume],
    identity: StoreIdentity,
    files: _Files,
    observer: Observer,
) -> tuple[_FoundIndex, StoreIdentity]:
    """The index where it belongs, or a new one, perhaps elsewhere, with what the segments say."""
    home = volumes[identity.index_stripe]
    for volume in volumes:
        if volume is not home and volume.health.writable:
            _remove_old_index(volume)
    load = partial(_load_index, home, identity, config.index_file_bytes, len(volumes))
    try:
        return home.probe(load, LOAD_S), identity
    except (StoreFormatError, StoreIOError, TimeoutError) as error:
        if isinstance(error, TimeoutError):
            home.health.take_out(error.strerror or str(error))
        _refuse_if_all_are_out(volumes, home)
        if files.numbers() or (home.path / INDEX_NAME).exists():
            _log.warning("hcache: the index cannot be used: %s; rebuilding it from the segments", error)
            observer.count("store.index_rebuilds")
    index, identity = _new_index(config, volumes, identity)
    rows = _scan(volumes, files)
    if index is not None:
        try:
            rows = _fill(index, rows)
        except StoreError as error:
            _log.warning("hcache: the new index cannot be written yet: %s", error)
            index = None  # the ledger makes another one, from memory
    numbers = [number for number in files.numbers() if number >= files.first_segment]
    recency = {number: Recency(number, 0.0) for number in numbers}
    return _FoundIndex(index, IndexContents(rows, [], recency, {}), {}), identity


def _refuse_if_all_are_out(volumes: Sequence[Volume], home: Volume) -> None:
    """Without index and segments nothing is known, and whatever is there would be taken for files of no run.

    Raises:
        StoreIOError: no directory can be read.
    """
    if not any(volume.health.readable for volume in volumes):
        raise StoreIOError(
            f"cannot use {home.path} (--hcache-dirs), which holds the index: {home.health.reason}; nothing was "
            "changed, start again when its disk answers"
        )


def _remove_old_index(volume: Volume) -> None:
    try:
        volume.call(lambda: remove_index(volume.path / INDEX_NAME), "an old index", writing=True)
    except StoreError as error:
        _log.warning("hcache: an index that does not count stays in %s: %s", volume.path, error)


def _load_index(home: Volume, identity: StoreIdentity, limit: int, num_stripes: int) -> _FoundIndex:
    """
    Raises:
        StoreFormatError, StoreIOError: it cannot be used.
        StoreLockedError: another program writes to it.
    """
    path = home.path / INDEX_NAME
    if not home.health.readable:
        raise StoreIOError(f"its directory is {home.health.condition}")
    if not home.health.writable:
        return _FoundIndex(None, *Index.read(path, num_stripes, identity.store_id))
    index = Index.open(path, identity.store_id, limit)
    try:
        if index.file_bytes() > limit:
            raise StoreFormatError("it is larger than the new --hcache-disk-size allows")
        return _FoundIndex(index, index.load(num_stripes), index.meta())
    except BaseException:
        index.close()
        raise


def _new_index(
    config: StoreConfig, volumes: Sequence[Volume], identity: StoreIdentity
) -> tuple[Index | None, StoreIdentity]:
    """An empty index, not complete yet; None if no directory takes it."""
    home = volumes[identity.index_stripe]
    for volume in (home, *volumes):
        if not volume.health.writable:
            continue
        path = volume.path / INDEX_NAME
        try:
            index = Index.create(path, identity.store_id, config.index_file_bytes)
        except StoreError as error:
            volume.health.failed(OSError(errno.EIO, str(error)), writing=True)
            continue
        if volume is not home:
            identity = identity.next(index_stripe=volume.stripe)
            publish(volumes, identity)
        return index, identity
    _log.warning("hcache: no directory takes writes; nothing new is stored until one does")
    return None, identity


def _scan(volumes: Sequence[Volume], files: _Files) -> list[RunRow]:
    """The runs that the segments hold."""
    directories: dict[int, StoreDirectory] = {
        volume.stripe: volume.directory for volume in volumes if volume.health.readable
    }
    numbers = [number for number in files.numbers() if number >= files.first_segment]
    rows: list[RunRow] = []
    for found in scan_segments(numbers, directories, len(volumes)):
        rows += [replace(row, number=len(rows) + place) for place, row in enumerate(found, 1)]
    return rows


def _fill(index: Index, rows: Sequence[RunRow]) -> list[RunRow]:
    """Put ``rows`` into a new index; returns those that it has room for.

    Raises:
        StoreError: it cannot be written.
    """
    kept: list[RunRow] = []
    try:
        for batch in batches(rows):
            index.insert(batch, {})
            kept += batch
    except StoreFullError as error:
        _log.warning("hcache: not all stored runs fit the index: %s", error)
    index.mark_complete()
    return kept


def _admit(
    row: RunRow,
    contents: IndexContents,
    files: _Files,
    volumes: Sequence[Volume],
    config: StoreConfig,
    shapes: ShapeTable,
    segments: dict[int, Segment],
    catalog: Catalog,
) -> bool:
    """Put a run into the catalog and its segment into ``segments``; False if its files do not hold it."""
    shape = shapes.get(len(row.keys), row.chunk_layer_bytes, row.members, row.rotation)
    place = RunPlace(row.run_id, row.namespace_id, row.keys, row.first_chunk, shape, row.segment, row.offsets)
    if not files.hold(place):
        return False
    segment = segments.get(row.segment)
    if segment is None:
        segment = segments[row.segment] = Segment(row.segment, volumes, row.members, config.file_bytes)
        recency = contents.recency.get(row.segment, Recency(0, 0.0))
        segment.last_used, segment.score = recency.last_used, recency.score
    elif segment.members != row.members:
        return False
    segment.used = [max(pair) for pair in zip(segment.used, place.ends, strict=True)]
    run = StoredRun(place, segment, row.number)
    run.quarantined = {
        chunk: why for chunk, why in contents.quarantined.get(row.number, {}).items() if chunk < len(row.keys)
    }
    catalog.adopt_run(run)
    return True


def _try_delete(ledger: Ledger, rows: Sequence[int]) -> None:
    try:
        for batch in batches(rows):  # each with a deadline of its own
            ledger.delete_runs(batch)
    except StoreError as error:
        _log.warning("hcache: could not tidy the index: %s", error)


def _count_torn(
    volumes: Sequence[Volume], files: _Files, segments: Mapping[int, Segment], observer: Observer
) -> None:
    """Report what a crash left behind the last run of the newest segment: written, but in no index."""
    newest = max(files.numbers(), default=None)
    if newest is None:
        return
    torn = 0
    for volume, sizes in zip(volumes, files.sizes, strict=True):
        if sizes is None or newest not in sizes:
            continue
        used = segments[newest].used[volume.stripe] if newest in segments else 0
        try:
            fd = os.open(volume.directory.segment_path(newest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            torn += parse_header(os.pread(fd, BLOCK, used)).part_bytes
        except (CorruptExtentError, OSError):
            continue
        finally:
            os.close(fd)
    if torn:
        observer.count("store.torn_bytes_reclaimed", torn)
