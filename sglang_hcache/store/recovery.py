"""What happens at start: load or rebuild the index, keep what the files bear out, reclaim the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError, StoreError, StoreFormatError, StoreFullError
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.directory import INDEX_NAME, StoreDirectory
from sglang_hcache.store.geometry import BLOCK, ShapeTable
from sglang_hcache.store.index import Index, RunRow
from sglang_hcache.store.record import parse_header
from sglang_hcache.store.scan import scan_segment
from sglang_hcache.store.segments import RunPlace, Segment, StoredRun

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What :func:`recover` found."""

    index: Index
    catalog: Catalog
    """Holds the runs, but not yet the segments: ``Space.adopt`` adds them."""
    segments: list[Segment]
    leftovers: list[Segment]
    """Segments without a single run: to be deleted."""
    next_number: int


def recover(
    config: StoreConfig,
    directories: Sequence[StoreDirectory],
    store_id: str,
    shapes: ShapeTable,
    observer: Observer,
) -> Recovered:
    """Bring index, memory and files into agreement; deletes rows but no files.

    Raises:
        StoreIOError: the index can neither be opened nor created.
    """
    sizes = [directory.segment_sizes() for directory in directories]
    numbers = sorted(set().union(*sizes))
    index = _open_index(config, directories, store_id, bool(numbers), observer)
    try:
        rows, recency = _rows(index, directories, numbers, shapes, observer)
    except BaseException:
        index.close()
        raise
    catalog = Catalog()
    segments: dict[int, Segment] = {}
    unusable = []
    for number, row in rows:
        place = _place(row, shapes)
        if not _files_hold(place, sizes):
            unusable.append(number)
            continue
        segment = segments.get(row.segment)
        if segment is None:
            segment = segments[row.segment] = Segment(row.segment, directories, config.file_bytes)
            segment.last_used = recency.get(row.segment, 0)
        ends = [a + b for a, b in zip(place.offsets, place.shape.part_bytes, strict=True)]
        segment.used = [max(pair) for pair in zip(segment.used, ends, strict=True)]
        catalog.add_run(StoredRun(place, segment, number))
    if unusable:
        _log.warning("%d stored runs lost their files and are forgotten", len(unusable))
        observer.count("store.runs_lost", len(unusable))
        _try_delete(index, unusable, observer)
    observer.count("store.runs_recovered", len(rows) - len(unusable))
    _count_torn(directories, numbers, segments, observer)
    leftovers = [
        Segment(number, directories, config.file_bytes) for number in numbers if number not in segments
    ]
    mentioned = [row.segment for _, row in rows]
    next_number = 1 + max([*numbers, *mentioned, *recency, -1])
    return Recovered(index, catalog, list(segments.values()), leftovers, next_number)


def _open_index(
    config: StoreConfig,
    directories: Sequence[StoreDirectory],
    store_id: str,
    has_data: bool,
    observer: Observer,
) -> Index:
    """The index of the first directory, or an empty incomplete one in its place."""
    path = directories[0].path / INDEX_NAME
    try:
        index = Index.open(path, store_id, config.index_file_bytes)
    except StoreFormatError as error:
        if has_data or path.exists():
            _log.warning("%s; rebuilding it from the segments", error)
            observer.count("store.index_rebuilds")
        return Index.create(path, store_id, config.index_file_bytes)
    if index.file_bytes() <= config.index_file_bytes:
        return index
    index.close()
    _log.warning("the index is larger than the new --hcache-disk-size allows; rebuilding it")
    observer.count("store.index_rebuilds")
    return Index.create(path, store_id, config.index_file_bytes)


def _rows(
    index: Index,
    directories: Sequence[StoreDirectory],
    numbers: Sequence[int],
    shapes: ShapeTable,
    observer: Observer,
) -> tuple[list[tuple[int, RunRow]], dict[int, int]]:
    """(row number, row) of all runs by age, and the recency of segments; fills an incomplete index."""
    if index.complete:
        rows, bad, recency = index.load(len(directories))
        if bad:
            observer.count("store.runs_lost", len(bad))
            _try_delete(index, bad, observer)
        return rows, recency
    found: list[tuple[int, RunRow]] = []
    try:
        for number in numbers:
            found += [(index.insert(row, {}), row) for row in scan_segment(number, directories, shapes)]
    except StoreFullError as error:
        _log.warning("not all stored runs fit the index: %s", error)
    index.mark_complete()
    return found, {number: number for number in numbers}


def _place(row: RunRow, shapes: ShapeTable) -> RunPlace:
    shape = shapes.get(len(row.keys), row.chunk_layer_bytes, row.rotation)
    return RunPlace(row.run_id, row.namespace_id, row.keys, row.first_chunk, shape, row.segment, row.offsets)


def _files_hold(place: RunPlace, sizes: Sequence[dict[int, int]]) -> bool:
    """Whether every part lies on the block grid inside its file."""
    for stripe, (offset, size) in enumerate(zip(place.offsets, place.shape.part_bytes, strict=True)):
        if size and (offset % BLOCK or offset + size > sizes[stripe].get(place.segment, 0)):
            return False
    return True


def _try_delete(index: Index, rows: Sequence[int], observer: Observer) -> None:
    try:
        index.delete_runs(rows)
    except StoreError as error:
        observer.count("store.io_errors")
        _log.warning("could not tidy the index: %s", error)


def _count_torn(
    directories: Sequence[StoreDirectory],
    numbers: Sequence[int],
    segments: dict[int, Segment],
    observer: Observer,
) -> None:
    """Report what a crash left behind the last run of the newest segment: written, but in no index."""
    if not numbers:
        return
    newest = numbers[-1]
    used = segments[newest].used if newest in segments else [0] * len(directories)
    torn = 0
    for directory, offset in zip(directories, used, strict=True):
        try:
            fd = os.open(directory.segment_path(newest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            torn += parse_header(os.pread(fd, BLOCK, offset)).part_bytes
        except (CorruptExtentError, OSError):
            continue
        finally:
            os.close(fd)
    if torn:
        observer.count("store.torn_bytes_reclaimed", torn)
