"""The metrics that the tier adds to SGLang's ``/metrics``: names, units, and which events count for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PREFIX = "sglang:hcache_"
RESTORE_PHASES = ("queue", "read", "project", "recompute")
"""Parts of a restore."""
NOTHING_SAVED = ("old_weights", "method", "switched_off")
"""Why nothing that is computed is saved."""
WAITING = ("resolved", "pending", "running", "pinned")
"""What the restore of a waiting request is at."""
SOURCES = ("host", "disk", "mixed")
"""Where the chunks of a restore were."""

_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
)
_GB_PER_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class CounterMetric:
    """A counter; ``_total`` is added to its name.

    ``events``: which event of the tier counts, or which measure adds up, for which value of ``label``. That is empty
    without one.
    """

    name: str
    help: str
    unit: str
    label: str
    events: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """A histogram. ``measures``: as ``CounterMetric.events``."""

    name: str
    help: str
    unit: str
    label: str
    measures: Mapping[str, str]
    buckets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GaugeMetric:
    """A size or a state, looked at every two seconds. ``values``: what its one label may be."""

    name: str
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


COUNTERS = (
    CounterMetric(
        "lookups",
        "Requests with whole chunks beyond their device prefix, by whether a tier has the next chunk.",
        "requests",
        "result", {"lookup.hits": "hit", "lookup.misses": "miss"},
    ),
    CounterMetric(
        "misses",
        "Requests with a chunk that is in no tier, by what is known about the first such chunk. evicted: it was stored "
        "and evicted for lack of room, or is missing on another rank alone; new: it is not among the last half million "
        "evictions, or it expired or was cleared. The new end of a growing prompt always counts as new.",
        "requests", "reason", {"lookup.missed_evicted": "evicted", "lookup.missed_new": "new"},
    ),
    CounterMetric(
        "restores",
        "Restores by outcome. predicted_slower and no_slots were not started. predicted_slower: recomputing was "
        "predicted to be faster. no_slots: the KV pool had no room behind other requests for 120 s. late: past the "
        "deadline. try_late: the same of a rare try that was predicted to be slower, or another rank lost it. "
        "failed_on_another_rank: failed or late there; this rank's part is not used.",
        "restores", "result",
        {
            "restore.done": "done", "restore.failed": "failed", "restore.late": "late",
            "restore.try_late": "try_late",
            "restore.failed_on_another_rank": "failed_on_another_rank",
            "restore.cancelled": "aborted", "restore.declined_slower": "predicted_slower",
            "restore.no_slots": "no_slots",
        },
    ),
    CounterMetric(
        "restores_yielded",
        "Restores that gave up their room in the KV pool. pin: the restore had ended and its request still waited; "
        "running: the restore was stopped because a running request needed its slots. They may be restored once more.",
        "restores", "what", {"restore.pins_given_back": "pin", "restore.stopped_for_room": "running"},
    ),
    CounterMetric(
        "saved_seconds",
        "Seconds that restores saved the requests that ran with what they brought: predicted recompute time minus time "
        "from decision to completion (on a GPU, excluding passes already running). Slower ones count in lost_seconds. "
        "Without predictions (--hcache-restore always with kv or hidden) neither is counted.",
        "seconds", "", {"restore.saved_seconds": ""},
    ),
    CounterMetric(
        "lost_seconds",
        "Seconds that restores cost waiting requests. slower: a successful restore took this much longer than the "
        "predicted recompute time. All other reasons: its whole time, from decision to end. aborted: stopped, because "
        "no request waited any more or a running request needed the room. unused: done, but its request never ran with "
        "it: it had left, or the room was given to others first. saved_seconds minus lost_seconds is what restores "
        "gain; what saving costs and waits before a restore are not in it.",
        "seconds", "reason",
        {
            "restore.lost_seconds_slower": "slower", "restore.lost_seconds_late": "late",
            "restore.lost_seconds_try_late": "try_late",
            "restore.lost_seconds_failed": "failed",
            "restore.lost_seconds_failed_on_another_rank": "failed_on_another_rank",
            "restore.lost_seconds_cancelled": "aborted",
            "restore.lost_seconds_unused": "unused",
        },
    ),
    CounterMetric(
        "restored_tokens", "Tokens whose K and V were restored from a tier.", "tokens",
        "tier", {"restore.tokens_host": "host", "restore.tokens_disk": "disk"},
    ),
    CounterMetric(
        "restored_bytes", "Bytes read from a tier by successful restores.", "bytes",
        "tier", {"restore.bytes_host": "host", "restore.bytes_disk": "disk"},
    ),
    CounterMetric(
        "chunks",
        "Chunks of 64 tokens, by what happened to them. outdated: only in host memory when the weights changed, so no "
        "longer written to disk.",
        "chunks", "event",
        {
            "host.chunks_sealed": "sealed", "host.duplicate_chunks": "duplicate",
            "host.chunks_evicted": "evicted_host", "demote.chunks_written": "demoted",
            "host.chunks_promoted": "promoted", "host.chunks_outdated": "outdated",
            "store.chunks_read": "read", "store.chunks_evicted": "evicted_disk",
            "store.chunks_expired": "expired_disk", "store.chunks_quarantined": "quarantined",
        },
    ),
    CounterMetric(
        "chunks_dropped",
        "Chunks that were not saved, and why; disk_full, write_budget, disk_error: not written, but in host memory "
        "until they are evicted there.", "chunks", "reason",
        {
            "capture.chunks_dropped_staging_full": "staging_full",
            "capture.chunks_dropped_incomplete": "incomplete_pass",
            "capture.chunks_dropped_host_full": "host_full",
            "capture.chunks_dropped_beginning_gone": "beginning_gone",
            "capture.chunks_dropped_behind_another": "behind_another",
            "demote.chunks_dropped_full": "disk_full",
            "demote.chunks_dropped_budget": "write_budget",
            "demote.chunks_dropped_error": "disk_error",
        },
    ),
    CounterMetric(
        "rows", "Rows (one token in one pass): captured, or not saved and why.", "rows", "result",
        {
            "capture.rows": "captured",
            "capture.rows_dropped_staging_full": "staging_full",
            "capture.rows_dropped_incomplete": "incomplete_pass",
        },
    ),
    CounterMetric(
        "disk_bytes", "Bytes of chunks, without headers, read from disk (every read is verified) or written to it.",
        "bytes", "direction", {"store.bytes_read": "read", "store.bytes_written": "written"},
    ),
    CounterMetric(
        "disk_events",
        "Faults and maintenance of the disk tier. demotion_late, demotion_failed: chunks were not written in time; "
        "they are written later.",
        "events", "event",
        {
            "store.io_errors": "io_error", "store.corrupt_extents": "corrupt_extent",
            "store.directory_trips": "directory_sick", "store.directory_recoveries": "directory_back",
            "store.segments_evicted": "segment_evicted", "store.segments_expired": "segment_expired",
            "store.unlink_failures": "unlink_failed",
            "store.writes_refused": "write_refused", "store.runs_lost": "run_lost",
            "store.upkeep_failures": "upkeep_failed",
            "demote.requests_dropped": "demotion_late", "demote.runs_failed": "demotion_failed",
        },
    ),
    CounterMetric(
        "errors",
        "Unexpected errors, which are in the log. Each one is a bug. io: in the threads that read and write.",
        "errors", "where",
        {
            "capture.errors": "capture", "restore.errors": "restore", "demote.errors": "demote",
            "store.errors": "store", "io.errors": "io", "metrics.errors": "metrics",
        },
    ),
)  # fmt: skip

HISTOGRAMS = (
    HistogramMetric(
        "restore_seconds",
        "Duration of a successful restore, from its first read to its last layer, by where its chunks were.",
        "seconds", "source", {f"restore.seconds_{source}": source for source in SOURCES}, _SECONDS,
    ),
    HistogramMetric(
        "wait_seconds",
        "How long requests that found something wait for their restore, each time. pending: until it starts or is "
        "declined: for room in the KV pool, for another request's restore of the same chunks, or because it would end "
        "long before SGLang can admit the request; running: until it ends; pinned: from then until SGLang admits the "
        "request.",
        "seconds", "phase", {f"wait.{phase}_seconds": phase for phase in WAITING if phase != "resolved"}, _SECONDS,
    ),
    HistogramMetric(
        "restore_phase_seconds",
        "Time that a successful restore spent in each phase. queue: behind earlier restores; read: waiting for reads; "
        "project: writing K and V, from hidden states or as stored; recompute: layers run by the model.",
        "seconds", "phase",
        {f"restore.{phase}_seconds": phase for phase in RESTORE_PHASES},
        _SECONDS,
    ),
    HistogramMetric(
        "restore_bandwidth", "Bytes read by a successful restore, divided by its duration.", "GB/s",
        "source", {f"restore.gb_per_s_{source}": source for source in SOURCES}, _GB_PER_S,
    ),
    HistogramMetric(
        "prediction_ratio", "Actual divided by predicted duration of a restore.", "ratio",
        "source", {f"restore.prediction_ratio_{source}": source for source in SOURCES}, _RATIOS,
    ),
)  # fmt: skip

GAUGES = (
    GaugeMetric(
        "tier_bytes",
        "Bytes that a tier takes. For host: those of unfinished chunks as well. For disk: what its files count against "
        "the capacity, including room for the next chunks and 16 KiB per file for file system overhead.",
        "bytes", ("tier",), ("host", "disk"),
    ),
    GaugeMetric(
        "tier_capacity_bytes", "Maximum bytes that a tier may take.", "bytes", ("tier",), ("host", "disk"),
    ),
    GaugeMetric("tier_chunks", "Complete chunks in a tier.", "chunks", ("tier",), ("host", "disk")),
    GaugeMetric(
        "unwritten_chunks",
        "Chunks in host memory that wait to be written to disk. 0 without a disk tier. Chunks that are not written at "
        "all, because of the write budget or a failing disk, are counted as dropped instead.",
        "chunks",
    ),
    GaugeMetric(
        "disk_written_24h_bytes",
        "Bytes of chunks, with their headers, written to disk in the last 24 hours, which the write budget limits.",
        "bytes",
    ),
    GaugeMetric(
        "disk_write_budget_bytes", "The write budget, bytes in any 24 hours. Missing if there is none.", "bytes",
    ),
    GaugeMetric(
        "directory_healthy",
        "1 while a directory of the disk tier can be read and written; 0 if it is full, read-only or out of service.",
        "bool", ("directory",),
    ),
    GaugeMetric(
        "directory_takes_writes",
        "1 while new chunks are written to a directory of the disk tier; 0 if it is not healthy, or if the free space "
        "floor leaves it no room.",
        "bool", ("directory",),
    ),
    GaugeMetric(
        "clearing_pending",
        "1 while a restart would bring back what a clear call removed from disk: no directory has recorded the clear "
        "yet, or the disk tier is not open.",
        "bool",
    ),
    GaugeMetric(
        "waiting_requests",
        "Requests with whole chunks in SGLang's queue, queued while the tier was on, by the state of their restore. "
        "pending: waits to start; running; pinned: ended, and its slots are held until the request is admitted; "
        "resolved: no restore.",
        "requests", ("phase",), WAITING,
    ),
    GaugeMetric(
        "nothing_saved",
        "1 while newly computed tokens are not saved. old_weights: after a weight update without a flush, until "
        "/flush_cache; method: the method is recompute; switched_off: by DELETE on /hicache/storage-backend; nothing "
        "is restored either.",
        "bool", ("reason",), NOTHING_SAVED,
    ),
    GaugeMetric("info", "Always 1. The labels are the version and the method.", "info", ("version", "method")),
)  # fmt: skip


def events_of(counter: str) -> Mapping[str, str]:
    """What adds up to a counter -> the value of its label."""
    return next(metric.events for metric in COUNTERS if metric.name == counter)


@dataclass(frozen=True, slots=True)
class Described:
    """A metric, for people."""

    name: str
    kind: str
    unit: str
    labels: str
    """Name of the label and its values; empty without one."""
    events: tuple[str, ...]
    """What ``/server_info`` calls it: a counter or a measure for each value of the label, in their order."""
    help: str


def describe() -> Iterator[Described]:
    """All metrics."""
    for counter in COUNTERS:
        yield _described(f"{counter.name}_total", "counter", counter, counter.events)
    for histogram in HISTOGRAMS:
        yield _described(histogram.name, "histogram", histogram, histogram.measures)
    for gauge in GAUGES:
        labels = _labels(", ".join(gauge.labels), gauge.values)
        yield Described(PREFIX + gauge.name, "gauge", gauge.unit, labels, (), gauge.help)


def _described(
    name: str, kind: str, metric: CounterMetric | HistogramMetric, events: Mapping[str, str]
) -> Described:
    labels = _labels(metric.label, dict.fromkeys(events.values()))
    return Described(PREFIX + name, kind, metric.unit, labels, tuple(events), metric.help)


def _labels(name: str, values: Iterable[str]) -> str:
    listed = ", ".join(values)
    return f"{name}: {listed}" if name and listed else name
