"""The catalogue of metrics: complete, documented, and fed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_hcache.cli.metrics import markdown
from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.core.metrics import COUNTERS, HISTOGRAMS, NOTHING_SAVED, SOURCES, WAITING, describe
from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.serving.metrics import MetricsObserver, TierGauges
from sglang_hcache.sglang_plugin.serving.state import tier_state
from sglang_hcache.sglang_plugin.serving.tickets import Phase
from sglang_hcache.store import DiskStore, StoreConfig, StoreStats
from sglang_hcache.store.config import DirectoryStats
from sglang_hcache.testing.stored_chunks import small_config
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import DISK, HOST, TieredStore

ROOT = Path(__file__).parents[4]
LABELS = {"model_name": "m", "tp_rank": "0"}

NOT_EXPORTED = {
    "lookup.requests",  # hits and misses
    "restore.tokens",  # by tier
    "restore.layers_recomputed",
    "capture.requests_out_of_order",
    "store.chunks_written",  # demoted
    "store.runs_recovered",
}  # fmt: skip
"""Events for people who look into ``/server_info`` only."""


def emitted(method: str) -> set[str]:
    """Names in calls of ``observer.<method>``, and names that are passed on to one."""
    found = set()
    for path in (ROOT / "sglang_hcache").rglob("*.py"):
        if path.parts[-2:] == ("core", "metrics.py") or "cli" in path.parts:  # which only reads them
            continue
        text = path.read_text()
        found |= set(re.findall(rf'\.{method}\(\s*"([a-z_]+\.[a-z_]+)"', text))
        if method == "count":
            found |= set(re.findall(r'"((?:capture|demote|lookup|host)\.[a-z_]+)"', text))
    return found


def test_every_event_is_a_metric_or_known_not_to_be() -> None:
    dynamic = {
        *(
            f"restore.{end}"
            for end in ("done", "failed", "failed_on_another_rank", "late", "try_late", "cancelled")
        ),
        *(f"restore.{what}_{tier}" for what in ("tokens", "bytes") for tier in (HOST, DISK)),
        *(
            f"restore.{what}_{source}"
            for what in ("seconds", "gb_per_s", "prediction_ratio")
            for source in SOURCES
        ),
        *(
            f"restore.lost_seconds_{end}"
            for end in ("failed", "failed_on_another_rank", "late", "try_late", "cancelled", "unused")
        ),
        *(f"capture.chunks_dropped_{why}" for why in ("incomplete", "staging_full")),
        *(f"wait.{phase.value}_seconds" for phase in Phase if phase is not Phase.RESOLVED),
    }
    events = {event for counter in COUNTERS for event in counter.events}
    measures = {measure for histogram in HISTOGRAMS for measure in histogram.measures}
    assert not events & measures
    assert events | measures | NOT_EXPORTED == emitted("count") | emitted("observe") | dynamic
    assert not (events | measures) & NOT_EXPORTED


def test_the_docs_list_every_metric() -> None:
    assert markdown() in (ROOT / "docs" / "metrics.md").read_text()


def test_the_dashboard_counts_a_request_once() -> None:
    """All ranks count the same requests and restores, and with ``--enable-metrics-for-all-schedulers`` all are seen.
    SGLang's own counts, by which some are divided, are of one process.
    """
    found = json.loads((ROOT / "configs" / "grafana" / "hcache.json").read_text())["panels"]
    queries = [target["expr"] for panel in found for target in panel.get("targets", ())]
    by_request = re.compile(
        r"sglang:hcache_(lookups|misses|restored_tokens|restores|saved_seconds|lost_seconds|wait_seconds|restore_seconds|restore_phase_seconds|prediction_ratio)"
        r"_\w+\{[^}]*\}"
    )
    selectors = [match.group() for query in queries for match in by_request.finditer(query)]
    assert len(selectors) >= 12
    assert not [selector for selector in selectors if 'tp_rank="0"' not in selector]
    of_all = "restored_bytes", "tier_bytes", "disk_bytes", "directory_healthy", "errors"
    assert not [query for query in queries if any(name in query for name in of_all) and "tp_rank" in query]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    layout = StateLayout((Method.HIDDEN,), (64,))
    host = HostTier(np.zeros(4 * layout.chunk_bytes, np.uint8), layout, Counters(), keep_dirty=True)
    disk = DiskStore.open(small_config(tmp_path), Counters())
    store = TieredStore(host, disk, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1)
    with closing(store):
        yield store


def state_of(tiers: TieredStore, **more: Any) -> dict[str, Any]:
    """What ``/server_info`` shows."""
    rest = {"version": "1.2", "layers": ["kv", "hidden", "kv"], "nothing_saved": None}
    return {**tier_state(tiers), **rest, "requests": dict.fromkeys(WAITING, 0), **more}


def test_gauges_say_what_the_state_says(tiers: TieredStore) -> None:
    registry = CollectorRegistry()
    state = state_of(tiers, nothing_saved="old_weights", requests={**dict.fromkeys(WAITING, 0), "pending": 3})
    state["host"]["dirty"], state["disk"]["clearing_pending"] = 2, True
    TierGauges(LABELS, lambda: state, Counters(), registry).close()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang:hcache_{name}", {**LABELS, **labels})

    assert value("info", version="1.2", method="hidden+kv") == 1
    assert value("unwritten_chunks") == 2
    assert value("clearing_pending") == 1
    assert [value("nothing_saved", reason=reason) for reason in NOTHING_SAVED] == [1, 0, 0]
    assert [value("waiting_requests", phase=phase) for phase in WAITING] == [0, 3, 0, 0]


def test_phases_have_the_names_of_tickets() -> None:
    assert tuple(phase.value for phase in Phase) == WAITING


def test_all_metrics_are_there_from_the_start(tiers: TieredStore) -> None:
    """Rates of what has not happened yet are zero, not missing."""
    registry = CollectorRegistry()
    MetricsObserver(LABELS, registry)
    TierGauges(LABELS, lambda: state_of(tiers), Counters(), registry).close()
    text = generate_latest(registry).decode()
    for metric in describe():
        assert f"# TYPE {metric.name.removesuffix('_total')}" in text, metric
    assert 'sglang:hcache_restores_total{model_name="m",result="late",tp_rank="0"} 0.0' in text
    assert 'sglang:hcache_tier_capacity_bytes{model_name="m",tier="host",tp_rank="0"} 16384.0' in text


def test_a_directory_without_room_is_healthy_and_takes_no_writes(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiers.disk is not None
    ways = ("healthy", ""), ("healthy", "no room"), ("read-only", "full"), ("out", "gone")
    directories = tuple(DirectoryStats(Path(f"/{number}"), *way) for number, way in enumerate(ways))
    stats = replace(tiers.disk.stats(), directories=directories)
    monkeypatch.setattr(tiers.disk, "stats", lambda: stats)
    registry = CollectorRegistry()
    TierGauges(LABELS, lambda: state_of(tiers), Counters(), registry).close()

    def values(name: str) -> list[float | None]:
        paths = ({**LABELS, "directory": str(item.path)} for item in directories)
        return [registry.get_sample_value(f"sglang:hcache_directory_{name}", labels) for labels in paths]

    assert (values("healthy"), values("takes_writes")) == ([1, 1, 0, 0], [1, 0, 0, 0])


def tiers_without_disk(config: StoreConfig) -> TieredStore:
    """Four slots, and a disk tier that could not be opened."""
    layout = StateLayout((Method.HIDDEN,), (64,))
    host = HostTier(np.zeros(4 * layout.chunk_bytes, np.uint8), layout, Counters(), keep_dirty=False)
    left_out, policy = StoreStats.not_opened(config, "no reason"), WritePolicy.WRITE_BACK
    return TieredStore(host, None, Counters(), write_policy=policy, run_chunks=1, left_out=left_out)


def test_a_slot_that_is_being_filled_takes_memory_and_is_no_chunk(tmp_path: Path) -> None:
    tiers, registry = tiers_without_disk(small_config(tmp_path)), CollectorRegistry()
    assert tiers.host.reserve() is not None
    TierGauges(LABELS, lambda: state_of(tiers), Counters(), registry).close()
    for name, value in (("chunks", 0), ("bytes", tiers.layout.chunk_bytes)):
        assert registry.get_sample_value(f"sglang:hcache_tier_{name}", {**LABELS, "tier": "host"}) == value


def test_directories_of_a_disk_tier_that_is_left_out_are_not_healthy(tmp_path: Path) -> None:
    """So that the same alert tells of them."""
    config = small_config(tmp_path, 2)
    tiers = tiers_without_disk(config)
    registry = CollectorRegistry()
    TierGauges(LABELS, lambda: state_of(tiers), Counters(), registry).close()
    for path in config.dirs:
        where = {**LABELS, "directory": str(path)}
        assert registry.get_sample_value("sglang:hcache_directory_healthy", where) == 0
    assert registry.get_sample_value("sglang:hcache_tier_chunks", {**LABELS, "tier": "disk"}) == 0


def test_events_and_measures_reach_their_metric() -> None:
    registry = CollectorRegistry()
    counters = Counters(MetricsObserver(LABELS, registry))
    counters.count("restore.done", 2)
    counters.count("nobody.knows")
    counters.observe("restore.read_seconds", 0.5)
    counters.observe("nobody.knows", 1.0)
    counters.observe("restore.saved_seconds", 1.25)
    counters.observe("restore.saved_seconds", 1.5)
    assert registry.get_sample_value("sglang:hcache_restores_total", {**LABELS, "result": "done"}) == 2
    name = "sglang:hcache_restore_phase_seconds_sum"
    assert registry.get_sample_value(name, {**LABELS, "phase": "read"}) == 0.5
    assert registry.get_sample_value("sglang:hcache_saved_seconds_total", LABELS) == 2.75
    assert counters["restore.done"] == 2


def test_gauges_that_cannot_be_set_are_counted() -> None:
    counters = Counters()
    TierGauges(LABELS, dict, counters, CollectorRegistry()).close()  # nothing in it
    assert counters["metrics.errors"] >= 1
