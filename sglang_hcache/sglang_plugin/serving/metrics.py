"""Feeds what the tier adds to SGLang's ``/metrics`` (``core/metrics.py`` lists it).

SGLang collects the metrics of its processes through files (prometheus_client's multi-process mode), so what the
scheduler's process counts here appears beside SGLang's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from sglang_hcache.core.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.tier.tiered import DISK, HOST, TieredStore

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
        names = list(labels)
        self._counters: dict[str, Any] = {}
        for counter in COUNTERS:
            made = Counter(PREFIX + counter.name, counter.help, [*names, counter.label], **where)
            for event, value in counter.events.items():
                self._counters[event] = made.labels(**labels, **{counter.label: value})
        self._histograms: dict[str, Any] = {}
        for histogram in HISTOGRAMS:
            more = [histogram.label] if histogram.label else []
            timed = Histogram(
                PREFIX + histogram.name, histogram.help, [*names, *more], buckets=histogram.buckets, **where
            )
            for measure, value in histogram.measures.items():
                self._histograms[measure] = timed.labels(
                    **labels, **({histogram.label: value} if more else {})
                )

    def count(self, event: str, amount: int = 1) -> None:
        """Add to the counter that ``event`` belongs to; events of none are left out."""
        counter = self._counters.get(event)
        if counter is not None:
            counter.inc(amount)

    def observe(self, measure: str, value: float) -> None:
        """Add to the histogram that ``measure`` belongs to."""
        histogram = self._histograms.get(measure)
        if histogram is not None:
            histogram.observe(value)


class TierGauges:
    """Looks at the tiers every two seconds, on a thread of its own.

    Args:
        labels, registry: as for :class:`MetricsObserver`.
    """

    def __init__(self, labels: Mapping[str, str], tiers: TieredStore, registry: Any = None) -> None:
        from prometheus_client import Gauge

        where = {} if registry is None else {"registry": registry}
        self._labels = dict(labels)
        self._tiers = tiers
        self._may_warn = Throttle()
        self._gauges = {
            gauge.name: Gauge(
                PREFIX + gauge.name,
                gauge.help,
                [*labels, *([gauge.label] if gauge.label else [])],
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
            if self._stopping.wait(_GAUGES_EVERY_S):
                return

    def look(self) -> None:
        """Set every gauge."""
        host = self._tiers.host
        free = host.counts().free
        chunk_bytes = self._tiers.layout.chunk_bytes
        self._set_tier(
            HOST, host.num_slots - free, (host.num_slots - free) * chunk_bytes, host.num_slots * chunk_bytes
        )
        disk = self._tiers.disk_stats
        if disk is None:
            return
        self._set_tier(DISK, disk.chunks, disk.physical_bytes, disk.cap_bytes)
        self._gauge("disk_written_24h_bytes").set(disk.written_today_bytes)
        for directory in disk.directories:
            healthy = float(directory.condition == "healthy")
            self._gauge("directory_healthy", directory=str(directory.path)).set(healthy)

    def _set_tier(self, tier: str, chunks: int, used: int, capacity: int) -> None:
        self._gauge("tier_chunks", tier=tier).set(chunks)
        self._gauge("tier_bytes", tier=tier).set(used)
        self._gauge("tier_capacity_bytes", tier=tier).set(capacity)

    def _gauge(self, name: str, **more: str) -> Any:
        return self._gauges[name].labels(**self._labels, **more)
