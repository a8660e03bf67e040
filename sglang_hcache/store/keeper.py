"""The store's own thread: what has to be done now and then, so that nobody who serves has to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from sglang_hcache.core.errors import HCacheError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.store.saved import SavedState
from sglang_hcache.store.space import Space
from sglang_hcache.store.volumes.health import Condition
from sglang_hcache.store.volumes.opening import take_again
from sglang_hcache.store.volumes.volume import Volume

logger = logging.getLogger(__name__)


class Keeper:
    """Watches the directories, takes them in again, makes room, writes down what must last.

    Args:
        write_down: saves what changes often; called at the end of each round.
        interval_s: seconds between rounds when nothing calls.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        saved: SavedState,
        space: Space,
        observer: Observer,
        write_down: Callable[[], None],
        interval_s: float,
    ) -> None:
        self._volumes = volumes
        self._saved = saved
        self._space = space
        self._observer = observer
        self._write_down = write_down
        self._interval_s = interval_s
        self._call = threading.Event()
        self._stopping = False
        self._may_warn = Throttle()
        self._may_trace = Throttle()  # of its own: what everybody expects must not hide what nobody does
        self._thread = threading.Thread(target=self._run, name="hcache-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Begin a round now. Never blocks."""
        self._call.set()

    def close(self, timeout_s: float | None) -> bool:
        """Stop after the present round; False if that takes longer than ``timeout_s`` seconds (None: however long)."""
        self._stopping = True
        self._call.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._call.wait(self._interval_s)
            self._call.clear()
            if self._stopping:
                return
            self.round()

    def round(self) -> None:
        """Everything once; a step that fails is counted, logged and tried again in the next round."""
        for volume in self._volumes:
            if volume.health.readable:
                self._try(volume.check_presence)
            if volume.health.is_due():
                self._try(partial(self._take_again, volume))
        self._try(self._saved.settle)
        self._try(self._space.tend)
        self._try(self._write_down)

    def _take_again(self, volume: Volume) -> None:
        seen = volume.health.condition
        try:
            identity, refusal = volume.attempt(lambda: take_again(volume, self._saved.identity))
            if refusal is None or seen is Condition.OUT:
                self._saved.outgrow(identity)
                self._space.reconcile(volume)
        except Exception as error:
            if not isinstance(error, HCacheError | OSError):
                self._unforeseen("hcache: %s cannot be taken in again", volume.path)
            volume.health.still_sick(getattr(error, "strerror", None) or str(error))
            return
        if refusal is None:
            volume.health.recover(seen)
        else:
            volume.health.mark_read_only(refusal, seen)
            self._space.relieve({volume.stripe})

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except HCacheError as error:
            if self._may_warn():
                logger.warning("hcache: the store's upkeep failed, will try again: %s", error)
            self._observer.count("store.upkeep_failures")
        except Exception:
            self._unforeseen("hcache: the store's upkeep failed, will try again")
            self._observer.count("store.upkeep_failures")

    def _unforeseen(self, message: str, *values: object) -> None:
        """Count and log the error that is being handled."""
        if self._may_trace():
            logger.exception(message, *values)
        self._observer.count("store.errors")
