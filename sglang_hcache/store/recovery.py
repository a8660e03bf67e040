"""What happens at start: load or rebuild the index, keep what the files bear out, reclaim the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_hcache.core.errors import (
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreIOError,
)
from sglang_hcache.core.observer import Observer
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.census import Census, Files
from sglang_hcache.store.config import StoreConfig
from sglang_hcache.store.format.names import INDEX_NAME
from sglang_hcache.store.format.rows import MAX_COUNT, IndexContents, Recency, RunPlace
from sglang_hcache.store.format.superblock import StoreIdentity
from sglang_hcache.store.index import LOAD_S, Index, batches
from sglang_hcache.store.index_files import remove_index
from sglang_hcache.store.ledger import Ledger
from sglang_hcache.store.segments import Segment
from sglang_hcache.store.volumes.opening import publish
from sglang_hcache.store.volumes.volume import Volume

_UNSEEN_SEGMENTS = 2**20
"""More than a directory holds that is out: new segments must not get the numbers of files that nobody has seen."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What :meth:`Recovery.run` found."""

    ledger: Ledger
    catalog: Catalog
    """Holds the runs, but not yet the segments: ``Space.adopt`` adds them."""
    segments: list[Segment]
    leftovers: list[Segment]
    """Files of no run: to be deleted."""
    next_number: int
    meta: dict[str, str]
    """Named values of the index."""


_Found = tuple[Index | None, IndexContents, dict[str, str]]
"""An index, what is in it, and its named values. No index if no directory takes one."""


class Recovery:
    """Brings index, memory and files into agreement; deletes rows but no files."""

    def __init__(
        self,
        config: StoreConfig,
        volumes: Sequence[Volume],
        identity: StoreIdentity,
        observer: Observer,
    ) -> None:
        self._config = config
        self._volumes = volumes
        self._identity = identity
        self._observer = observer
        self._catalog = Catalog(config.cost_doubling_tokens)
        self._files = Files.listed(identity.first_segment, volumes)
        self._is_good = True
        """The index was read, or made."""

    @property
    def _home(self) -> Volume:
        """The directory of the index."""
        return self._volumes[self._identity.index_stripe]

    def run(self) -> Recovered:
        """Once. Raises StoreError if no directory can be read, OSError if this process lacks something."""
        index, contents, meta = self._find_index()
        try:
            return self._agreed(index, contents, meta)
        except BaseException:
            if index is not None:  # an open one is locked
                with contextlib.suppress(OSError):
                    self._home.attempt(index.close)
            raise

    def _agreed(self, index: Index | None, contents: IndexContents, meta: dict[str, str]) -> Recovered:
        """What the index and the files say together. Raises StoreError."""
        ledger = Ledger(
            index, self._volumes, self._identity, self._catalog, self._config, is_good=self._is_good
        )
        census = Census(self._files, self._volumes, self._catalog, self._config.file_bytes)
        unusable = [*contents.bad_rows]
        for number, place in contents.runs.items():
            recency = contents.recency.get(place.segment, Recency(0, 0.0))
            if not census.admit(number, place, recency, contents.quarantined.get(number, {})):
                unusable.append(number)
        census.expect_uncut()
        if unusable:
            logger.warning("hcache: %d stored runs lost their files and are forgotten", len(unusable))
            self._observer.count("store.runs_lost", len(unusable))
        orphans = contents.quarantined.keys() - contents.runs.keys()
        _try_delete(ledger.delete_runs, [*unusable, *orphans])
        self._catalog.skip_run_numbers(_last_number(contents))
        if index is not None:
            # Of an eviction that was killed, or overtaken by what saves recency: nobody else would ever delete it.
            _try_delete(ledger.delete_recency, sorted(contents.recency.keys() - census.segments.keys()))
        num_recovered = len(contents.runs) + len(contents.bad_rows) - len(unusable)
        self._observer.count("store.runs_recovered", num_recovered)
        mentioned = [place.segment for place in contents.runs.values()]
        highest = max(
            [*self._files.numbers(), *mentioned, *contents.recency, self._identity.first_segment - 1]
        )
        is_all = all(volume.health.readable for volume in self._volumes)
        return Recovered(
            ledger=ledger,
            catalog=self._catalog,
            segments=list(census.segments.values()),
            leftovers=census.leftovers(),
            next_number=highest + 1 + (0 if is_all else _UNSEEN_SEGMENTS),
            meta=meta,
        )

    # -- the index -------------------------------------------------------------------------------

    def _find_index(self) -> _Found:
        """The index where it belongs, or a new one from the headers, perhaps elsewhere."""
        home = self._home
        for volume in self._volumes:
            if volume is not home and (volume.health.writable or volume.health.is_full):
                _remove_old_index(volume)
        try:
            return home.attempt(self._load_index, LOAD_S)
        except (StoreFormatError, StoreIOError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                home.health.take_out(error.strerror or str(error))
            self._refuse_if_all_are_out()
            if self._files.numbers() or _has_index(home):
                logger.warning("hcache: the index cannot be used: %s; rebuilding it from the segments", error)
                self._observer.count("store.index_rebuilds")
        return self._rebuilt()

    def _refuse_if_all_are_out(self) -> None:
        """Without index and segments nothing is known, and whatever is there would be taken for files of no run.

        Raises:
            StoreIOError: no directory can be read.
        """
        if not any(volume.health.readable for volume in self._volumes):
            raise StoreIOError(
                f"cannot use {self._home.path} (--hcache-dirs), which holds the index: {self._home.health.reason}; "
                "nothing was changed, start again when its disk answers"
            )

    def _load_index(self) -> _Found:
        """
        Raises:
            StoreFormatError, StoreIOError: it cannot be used.
            StoreLockedError: another program writes to it.
        """
        path, store_id, limit = (
            self._home.path / INDEX_NAME,
            self._identity.store_id,
            self._config.index_file_bytes,
        )
        if not self._home.health.readable:
            raise StoreIOError(f"its directory is {self._home.health.condition}")
        if not self._home.health.writable:
            contents, meta = Index.read(path, len(self._volumes), store_id, self._home.goes_on)
            return None, contents, meta
        index = Index.open(path, store_id, limit, self._home.goes_on)
        try:
            if index.file_bytes() > limit:
                raise StoreFormatError("it is larger than the new --hcache-disk-size allows")
            return index, index.load(len(self._volumes), self._home.goes_on), index.meta()
        except BaseException:
            index.close()
            raise

    def _rebuilt(self) -> _Found:
        """A new index with the runs that the segments hold; those in directories that are out are believed."""
        places = self._files.runs(self._volumes)
        self._refuse_if_all_are_out()
        runs, index = dict(enumerate(places, 1)), self._new_index()
        if index is not None:
            try:
                runs = self._fill(index, runs)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._home.attempt(index.close)
                if not isinstance(error, StoreError):
                    raise
                logger.warning(
                    "hcache: the new index cannot be written, the next start makes it anew: %s", error
                )
                index = None
        self._is_good = index is not None
        recency = {place.segment: Recency(place.segment, 0.0) for place in places}
        return index, IndexContents(runs, [], recency, {}), {}

    def _new_index(self) -> Index | None:
        """An empty index, not complete yet; None if no directory takes it. From now on its directory is home."""
        home, store_id, limit = self._home, self._identity.store_id, self._config.index_file_bytes
        for volume in (home, *self._volumes):
            if not volume.health.writable:
                continue
            create = partial(Index.create, volume.path / INDEX_NAME, store_id, limit)
            try:
                index = volume.call(create, "cannot create the index", writing=True)
            except StoreError as error:
                logger.warning("hcache: %s cannot hold the index: %s", volume.path, error)
                continue
            if volume is not home:
                self._identity = self._identity.next(index_stripe=volume.stripe)
                publish(self._volumes, self._identity)
            return index
        logger.warning("hcache: no directory takes writes; nothing new is stored until one does")
        return None

    def _fill(self, index: Index, runs: Mapping[int, RunPlace]) -> dict[int, RunPlace]:
        """Put ``runs`` into a new index; returns those that it has room for.

        Raises:
            StoreError: it cannot be written.
        """

        def put(function: Callable[[], None]) -> None:
            self._home.call(function, "cannot write the index", writing=True)

        kept: dict[int, RunPlace] = {}
        try:
            for batch in batches(sorted(runs.items(), reverse=True)):  # the newest first
                put(partial(index.insert, dict(batch)))
                kept.update(batch)
        except StoreFullError as error:
            logger.warning("hcache: not all stored runs fit the index: %s", error)
        put(index.mark_complete)
        return dict(sorted(kept.items()))


def _last_number(contents: IndexContents) -> int:
    """The largest in use. Rows that could not be deleted would clash with new runs, or speak of them."""
    numbers = [*contents.runs, *contents.bad_rows, *contents.quarantined]
    return max((number for number in numbers if number < MAX_COUNT), default=0)


def _has_index(home: Volume) -> bool:
    try:
        return home.call((home.path / INDEX_NAME).exists, "cannot ask for the index")
    except StoreError:
        return False


def _remove_old_index(volume: Volume) -> None:
    try:
        volume.call(partial(remove_index, volume.path / INDEX_NAME), "an old index", writing=True)
    except StoreError as error:
        logger.warning("hcache: an index that does not count stays in %s: %s", volume.path, error)


def _try_delete(delete: Callable[[Sequence[int]], None], rows: Sequence[int]) -> None:
    try:
        for batch in batches(rows):  # each with a deadline of its own
            delete(batch)
    except StoreError as error:
        logger.warning("hcache: could not tidy the index: %s", error)
