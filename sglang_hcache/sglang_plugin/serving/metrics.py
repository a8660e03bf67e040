"""Feeds what the tier adds to SGLang's ``/metrics`` (``core/metrics.py`` lists it).

SGLang collects the metrics of its processes through files (prometheus_client's multi-process mode), so what the
scheduler's process counts here appears beside SGLang's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sglang_hcache.core.metrics import COUNTERS, GAUGES, HISTOGRAMS, NOTHING_SAVED, PREFIX, WAITING
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.tier.tiered import DISK, HOST

logger = logging.getLogger(__name__)

_GAUGES_EVERY_S = 2.0


class MetricsObserver:
    """An ``Observer`` that passes on to prometheus_client.

    Args:
        labels: SGLang's own labels of this process, such as ``model_name``.
        registry: of prometheus_client; None for its global one.
    """

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        # Not before: SGLang says through the environment, at start, where processes meet.
        from prometheus_client import Counter, Histogram

        where = {} if registry is None else {"registry": registry}
        self._counters: dict[str, Any] = {}
        for counter in COUNTERS:
            more = [counter.label] if counter.label else []
            made = Counter(PREFIX + counter.name, counter.help, [*labels, *more], **where)
            for event, value in counter.events.items():
                self._counters[event] = made.labels(**labels, **dict.fromkeys(more, value))
        self._histograms: dict[str, Any] = {}
        for histogram in HISTOGRAMS:
            timed = Histogram(
                PREFIX + histogram.name,
                histogram.help,
                [*labels, histogram.label],
                buckets=histogram.buckets,
                **where,
            )
            for measure, value in histogram.measures.items():
                self._histograms[measure] = timed.labels(**labels, **{histogram.label: value})

    def count(self, event: str, amount: int = 1) -> None:
        """Add to the counter that ``event`` belongs to; events of none are left out."""
        counter = self._counters.get(event)
        if counter is not None:
            counter.inc(amount)

    def observe(self, measure: str, value: float) -> None:
        """Add to the histogram, or to the counter, that ``measure`` belongs to."""
        histogram = self._histograms.get(measure)
        if histogram is not None:
            histogram.observe(value)
        elif measure in self._counters:
            self._counters[measure].inc(value)


class TierGauges:
    """Looks at the tier every two seconds, on a thread of its own.

    Args:
        labels, registry: as for :class:`MetricsObserver`.
        state: what ``/server_info`` shows; called on that thread.
        observer: told of errors.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        state: Callable[[], Mapping[str, Any]],
        observer: Observer,
        registry: Any = None,
    ) -> None:
        from prometheus_client import Gauge

        where = {} if registry is None else {"registry": registry}
        self._labels = dict(labels)
        self._state = state
        self._observer = observer
        self._may_warn = Throttle()
        self._gauges = {
            gauge.name: Gauge(
                PREFIX + gauge.name,
                gauge.help,
                [*labels, *gauge.labels],
                multiprocess_mode="mostrecent",
                **where,
            )
            for gauge in GAUGES
        }
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hcache-gauges", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join(_GAUGES_EVERY_S)

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                if self._may_warn():
                    logger.exception("hcache: metrics could not be updated")
                self._observer.count("metrics.errors")
            if self._stopping.wait(_GAUGES_EVERY_S):
                return

    def look(self) -> None:
        """Set every gauge."""
        state = self._state()
        self._set("info", 1, version=state["version"], method="+".join(sorted(set(state["layers"]))))
        for reason in NOTHING_SAVED:
            self._set("nothing_saved", state["nothing_saved"] == reason, reason=reason)
        for phase in WAITING:
            self._set("waiting_requests", state["requests"][phase], phase=phase)
        host, disk = state["host"], state["disk"]
        used, chunk_bytes = host["slots"] - host["free"], host["chunk_bytes"]
        chunks = host["clean"] + host["dirty"]
        self._set_tier(HOST, chunks, used * chunk_bytes, host["slots"] * chunk_bytes)
        self._set("unwritten_chunks", host["dirty"])
        if disk is None:
            return
        self._set_tier(DISK, disk["chunks"], disk["bytes"], disk["cap_bytes"])
        self._set("disk_written_24h_bytes", disk["written_today_bytes"])
        if disk["write_budget_bytes"] is not None:
            self._set("disk_write_budget_bytes", disk["write_budget_bytes"])
        self._set("clearing_pending", disk["clearing_pending"])
        for directory in disk["directories"]:
            path = directory["path"]
            self._set("directory_healthy", directory["condition"] == "healthy", directory=path)
            self._set("directory_takes_writes", directory["takes_writes"], directory=path)

    def _set_tier(self, tier: str, chunks: int, used: int, capacity: int) -> None:
        self._set("tier_chunks", chunks, tier=tier)
        self._set("tier_bytes", used, tier=tier)
        self._set("tier_capacity_bytes", capacity, tier=tier)

    def _set(self, name: str, value: float, **more: str) -> None:
        self._gauges[name].labels(**self._labels, **more).set(value)
