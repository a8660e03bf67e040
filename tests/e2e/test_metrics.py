"""Traffic, a small host tier and a failing disk: every metric that the tier adds to ``/metrics`` moves."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sglang_hcache import __version__
from sglang_hcache.core.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, WAITING
from tests.e2e import dashboard
from tests.e2e.harness import TierServer, put_back, random_prompt, wait_for
from tests.e2e.test_plans import write_profile

_PATIENCE_S = 90.0
_NOT_DRAWN = {
    *("tier_chunks", "unwritten_chunks", "waiting_requests", "clearing_pending", "nothing_saved", "info"),
    *("restores_yielded_total", "directory_takes_writes"),
}
"""For alerts, and for who looks for something."""

ERRORS = ("capture", "restore", "demote", "store", "io", "metrics")
NAME = re.compile(rf"{PREFIX}(\w+)")

Samples = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    folder, model = tmp_path_factory.mktemp("metrics"), tiny_model()
    write_profile(model, folder / "costs.json", fixed=10, hidden=1, kv=4, project=1, run=1000)
    config = folder / "hcache.yaml"
    settings = {
        "dirs": [str(folder / "disk")], "disk_size": "64MB", "disk_free_floor": 0,
        "disk_write_budget": "1TB", "profile": str(folder / "costs.json"),
        "host_size": "8MB",  # about 20 chunks
        "staging_size": "1MB",  # fewer rows than a pass of 512 tokens has
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings))
    arguments = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "8192", "--enable-metrics"),
        *("--chunked-prefill-size", "512", "--hcache-config", str(config), "--hcache-method", "auto"),
        *("--log-level", "debug"),
    ]
    running = TierServer(folder, arguments)
    for switch in ("io_faults", "keep_costs"):
        (running.switches / switch).touch()
    with running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def prometheus(
    server: TierServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dashboard.Prometheus | None]:
    """Scrapes from before the first request on; None where it is not installed."""
    if shutil.which("prometheus") is None:
        yield None
        return
    with dashboard.Prometheus(tmp_path_factory.mktemp("prometheus"), server.process.url) as running:
        yield running


def read(server: TierServer) -> Samples:
    """Our metrics: name of the sample -> values of its own labels -> value."""
    text = httpx.get(f"{server.process.url}/metrics", trust_env=False).text
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                own = (
                    *("result", "tier", "event", "reason", "direction", "where", "phase", "directory"),
                    *("what", "source", "version", "method"),
                )
                key = tuple(sample.labels[name] for name in own if name in sample.labels)
                at = found.setdefault(sample.name.removeprefix(PREFIX), {})
                at[key] = at.get(key, 0.0) + sample.value
    return found


def health(server: TierServer) -> set[float]:
    return set(read(server)["directory_healthy"].values())


def prometheus_says(prometheus: dashboard.Prometheus) -> set[float]:
    """Whether all directories were healthy, in the last minutes."""
    (directories,) = prometheus.series("min(sglang:hcache_directory_healthy)", "")
    return set(directories.values)


def come_back(server: TierServer, prompt: list[int]) -> int:
    """Ask ``prompt`` again with an empty device; tokens that were restored."""
    server.to_tiers()
    server.settle()
    return server.ask(prompt, tokens=1).restored


def test_every_metric_moves(server: TierServer) -> None:
    before = read(server)
    of_warm_up = {"rows"}
    assert all(
        not any(before[f"{each.name}_total"].values()) for each in COUNTERS if each.name not in of_warm_up
    )

    prompts = [random_prompt(seed, 230) for seed in range(10)]
    server.ask(prompts[0], tokens=1)
    assert come_back(server, prompts[0]) == 192  # from host memory
    for prompt in prompts[1:]:
        server.ask(prompt, tokens=1)
        server.settle()
        server.flush_device()  # to disk; those of the first one leave host memory
    assert come_back(server, prompts[0]) == 192
    server.ask(random_prompt(20, 500), tokens=1)  # more rows than staging has
    with server.switched_on("break_restore"):
        assert come_back(server, prompts[-1]) == 0
    with server.switched_on("fail_reads"):
        assert come_back(server, prompts[2]) == 0

    after = read(server)
    of_a_full_pool = {"restores_yielded"}  # in test_serving.py
    for counter in COUNTERS:
        if counter.name not in of_a_full_pool:
            assert sum(after[f"{counter.name}_total"].values()) > 0, counter.name
    for histogram in HISTOGRAMS:
        of_label = before[f"{histogram.name}_count"]
        assert set(of_label) == set(after[f"{histogram.name}_count"])
        if histogram.name != "restore_phase_seconds":
            assert sum(after[f"{histogram.name}_count"].values()) > sum(of_label.values()), histogram.name
    for phase in ("queue", "read", "project"):
        assert after["restore_phase_seconds_count"][(phase,)] == after["restores_total"][("done",)]
    expected = {"done": 2, "failed": 2, "late": 0, "aborted": 0, "predicted_slower": 0, "no_slots": 0}
    expected |= {"try_late": 0, "failed_on_another_rank": 0}
    assert after["restores_total"] == {(result,): count for result, count in expected.items()}
    assert after["restored_tokens_total"] == {("host",): 192, ("disk",): 192}
    assert after["misses_total"][("new",)] > 0
    assert after["chunks_dropped_total"][("staging_full",)] > 0
    assert after["rows_total"][("staging_full",)] > 0
    assert after["disk_events_total"][("io_error",)] > 0
    assert after["errors_total"] == {(where,): int(where == "restore") for where in ERRORS}


def test_gauges_say_what_is_there(server: TierServer) -> None:
    server.settle()
    seen: list[tuple[Samples, dict[str, Any]]] = []

    def agree() -> bool:
        """The gauges of one moment say what is there, of a directory that is used again after its failed reads."""
        seen.append((read(server), server.state()))
        found, state = seen[-1]
        there = {
            ("host",): state["host"]["clean"] + state["host"]["dirty"],
            ("disk",): state["disk"]["chunks"],
        }
        on_disk = found["tier_bytes"][("disk",)], found["disk_written_24h_bytes"][()]
        unwritten = found["unwritten_chunks"][()] == state["host"]["dirty"]
        is_used = set(found["directory_takes_writes"].values()) == {1.0}
        return found["tier_chunks"] == there and unwritten and min(on_disk) > 0 and is_used

    wait_for(agree, "gauges that say what is there", _PATIENCE_S)
    found, host = seen[-1][0], seen[-1][1]["host"]
    assert set(found) >= {gauge.name for gauge in GAUGES}
    assert found["tier_capacity_bytes"][("host",)] == host["slots"] * host["chunk_bytes"]
    assert found["tier_bytes"][("disk",)] <= found["tier_capacity_bytes"][("disk",)] == 64e6
    (directory,) = found["directory_takes_writes"]
    assert directory[0].endswith("disk")
    assert found["directory_healthy"] == {directory: 1}
    assert found["disk_write_budget_bytes"] == {(): 1e12}
    assert found["info"] == {(__version__, "hidden"): 1}
    assert found["clearing_pending"] == {(): 0}
    assert found["nothing_saved"] == {("old_weights",): 0, ("method",): 0, ("switched_off",): 0}
    assert set(found["waiting_requests"]) == {(phase,) for phase in WAITING}


def test_a_sick_directory_shows(server: TierServer, prometheus: dashboard.Prometheus | None) -> None:
    seeds = itertools.count(30)

    def shows() -> bool:
        """After one more chunk that cannot be written: the directory is tried again every second."""
        server.ask(random_prompt(next(seeds), 230), tokens=1)
        server.flush_device()
        return health(server) == {0.0} and (prometheus is None or 0.0 in prometheus_says(prometheus))

    with server.switched_on("fail_writes"):
        wait_for(shows, "a directory that is out", _PATIENCE_S)
    wait_for(lambda: health(server) == {1.0}, "the directory to be well again", _PATIENCE_S)


def test_a_clear_call_is_answered_when_it_is_for_good(server: TierServer) -> None:
    seeds = itertools.count(60)

    def had_to_wait() -> bool:
        """While the directory takes no writes: it is tried again every second."""
        server.ask(random_prompt(next(seeds), 230), tokens=1)
        server.flush_device()
        if server.post("/hicache/storage-backend/clear").status_code == 400:
            return False  # a busy machine: not within the time that a clear call has
        assert not server.state()["disk"]["clearing_pending"]
        return "the clear is durable now" in server.process.log_text()

    with server.switched_on("fail_writes"):
        wait_for(had_to_wait, "a clearing that no directory takes down", _PATIENCE_S)
    assert "no directory takes the note that all was cleared" in server.process.log_text()
    assert server.state()["disk"]["chunks"] == 0


def test_a_clear_call_says_if_it_is_not_for_good(server: TierServer) -> None:
    path = Path(server.state()["disk"]["directories"][0]["path"])
    away = path.rename(path.with_name("away"))
    path.write_text("so that it is not made anew")
    wait_for(lambda: health(server) == {0.0}, "a directory that is out", _PATIENCE_S)
    assert server.post("/hicache/storage-backend/clear").status_code == 400
    assert server.state()["disk"]["clearing_pending"]
    wait_for(lambda: read(server)["clearing_pending"] == {(): 1.0}, "the metric to say so", _PATIENCE_S)
    put_back(away, path)
    wait_for(lambda: not server.state()["disk"]["clearing_pending"], "it to be written down", _PATIENCE_S)
    wait_for(lambda: health(server) == {1.0}, "the directory to be well again", _PATIENCE_S)


def test_each_query_of_the_dashboard_returns_data(
    prometheus: dashboard.Prometheus | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if prometheus is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    queries = [query for panel in dashboard.panels() for query in panel.queries]
    assert len(queries) > 20
    empty = [query for query, legend in queries if not any(prometheus.series(query, legend))]
    assert not empty
    assert prometheus_says(prometheus) == {0.0, 1.0}  # out and back, as the server said above
    picture = Path(request.config.getoption("--screenshots", default=None) or tmp_path) / "dashboard.png"
    dashboard.draw(prometheus, picture)
    assert picture.stat().st_size > 50_000


def test_prometheus_evaluates_the_alerts(prometheus: dashboard.Prometheus | None) -> None:
    if prometheus is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    wait_for(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "alerts to be evaluated")
    rules = dashboard.CONFIGS / "prometheus" / "hcache-alerts.yml"
    written = rules.read_text().count("- alert:")
    assert len(prometheus.rules()) == written > 10


def test_the_dashboard_knows_every_metric() -> None:
    shown = {
        name for panel in dashboard.panels() for query, _ in panel.queries for name in NAME.findall(query)
    }
    ours = {f"{counter.name}_total" for counter in COUNTERS} | {gauge.name for gauge in GAUGES}
    histograms = {histogram.name for histogram in HISTOGRAMS}
    suffix = re.compile("_(bucket|sum|count)$")
    found = {name if name in ours else suffix.sub("", name) for name in shown}
    assert found == (ours | histograms) - _NOT_DRAWN
    assert ours >= _NOT_DRAWN


def test_the_debug_log_tells_the_life_of_a_request(server: TierServer) -> None:
    prompt = random_prompt(90, 230)
    server.ask(prompt, tokens=1)
    assert come_back(server, prompt) == 192
    lives = [line for line in server.process.log_text().splitlines() if "hcache: request " in line]
    first, second = lives[-2:]
    assert "prompt of 230 tokens = 0 device + 0 host + 0 storage + 230 computed" in first
    assert re.search(r"computed: \+\d+\.\d{3} queued with 3 whole chunks, a miss; ", first)
    assert "prompt of 230 tokens = 0 device + 192 host + 0 storage + 38 computed" in second
    order = (
        "a hit",
        "restore of 192 tokens behind 0 starts: ",
        "restored in ",
        "admitted with 192 ",
        "over after 1 ",
    )
    assert [word for _, word in sorted((second.index(word), word) for word in order)] == list(order)


def test_the_debug_log_is_switched_while_the_server_runs(server: TierServer) -> None:
    """By SGLang's own call, which sets the level in all of its processes."""

    def lives(level: str, seed: int) -> int:
        """Lines of a request's life that come of a request at this level."""
        assert server.post("/configure_logging", {"log_level": level}).status_code == 200
        before = server.process.log_text().count("hcache: request ")
        server.ask(random_prompt(seed, 230), tokens=1)
        server.settle()
        return server.process.log_text().count("hcache: request ") - before

    assert lives("info", 91) == 0
    assert lives("debug", 92) == 1
