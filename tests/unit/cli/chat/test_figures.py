"""What ``hcache chat`` shows of an answer and of the tier."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_hcache.cli.chat.conversation import Exchange, Measures, Phase
from sglang_hcache.cli.chat.figures import (
    _RESULT_NAMES,
    exchange_html,
    measures_text,
    seconds_text,
    source_segments,
    sources_html,
    strip_html,
    tier_html,
    trouble_text,
)
from sglang_hcache.cli.chat.watch import Look, Reach
from sglang_hcache.cli.server.answers import TokenSources
from sglang_hcache.core.layout import Method
from sglang_hcache.core.metrics import events_of
from tests.unit.cli.test_top import state

SOURCES = TokenSources(device=10, host=1000, disk=0, recomputed=990)


def measures(**changes: Any) -> Measures:
    fields = {"ttft_s": 0.25, "latest_s": 1.25, "num_tokens": 11, "sources": SOURCES, "is_cut": False}
    return Measures(**{**fields, **changes})  # type: ignore[arg-type]


def exchange(phase: Phase, **changes: Any) -> Exchange:
    return Exchange("q", answer="a", phase=phase, measures=measures(**changes))


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def test_segments_add_up() -> None:
    segments = source_segments(SOURCES)
    assert [segment.kind for segment in segments] == ["device", "host", "disk", "recomputed"]
    assert sum(segment.percent for segment in segments) == pytest.approx(100)
    assert segments[1].percent == 50
    nothing = source_segments(TokenSources(device=0, host=0, disk=0, recomputed=0))
    assert all(segment.percent == 0 for segment in nothing)


def test_a_bar_says_its_numbers_to_all() -> None:
    html = sources_html(SOURCES)
    assert 'aria-label="Prompt of 2,000 tokens by source: 10 GPU, 1,000 host, 0 disk, 990 recomputed"' in html
    assert text_of(html) == "GPU 10 host 1,000 disk 0 recomputed 990"
    assert html.count('class="seg ') == 3  # nothing came from disk


def test_measures() -> None:
    assert measures_text(measures()) == "TTFT 250 ms · 10.0 tokens/s · 11 tokens answered"
    assert measures_text(measures(num_tokens=1)) == "TTFT 250 ms · 1 token answered"
    assert [seconds_text(value) for value in (0.0123, 1.5)] == ["12 ms", "1.50 s"]


def test_below_an_answer() -> None:
    assert exchange_html(Exchange("q")) == ""
    assert exchange_html(exchange(Phase.STREAMING, sources=None)).count("<div") == 1
    assert 'class="bar"' in exchange_html(exchange(Phase.DONE))
    stopped = exchange_html(exchange(Phase.STOPPED, sources=None))
    assert "stopped" in stopped
    assert "at the end of an answer" in stopped
    assert "asked for" in exchange_html(exchange(Phase.DONE, is_cut=True))
    assert "asked for" not in exchange_html(exchange(Phase.DONE))


def test_a_server_without_the_tier() -> None:
    assert "--hierarchical-cache hcache" in tier_html(Look(reach=Reach.UP, model="m"))
    assert "Nothing is known" in tier_html(Look())


@pytest.mark.parametrize("lacking", ["host", "counters", "disk", "measures"])
def test_a_tier_of_another_version(lacking: str) -> None:
    tier = {name: part for name, part in state().items() if name != lacking}
    assert "not that of this version" in tier_html(tier_look(tier=tier))


def tier_look(**changes: Any) -> Look:
    counters = {"lookup__requests": 8, "lookup__hits": 6, "restore__done": 5, "restore__failed": 1}
    fields = {
        "reach": Reach.UP,
        "model": "m",
        "tier": state(**counters, restore__tokens_disk=640),
    }
    return Look(**{**fields, **changes})


def test_the_tier() -> None:
    shown = text_of(tier_html(tier_look(layers=(Method.KV, Method.HIDDEN, Method.HIDDEN))))
    assert "Host memory 8.0 KB of 10.0 KB 6 chunks · 5 of them not on disk yet · 2 more unfinished" in shown
    assert "Disk 5.0 MB of 10.0 MB 1,234 chunks" in shown
    assert "/b: out: EIO" in shown
    assert "75% 6 of 8 requests found" in shown
    assert "done 5 failed 1" in shown
    assert "seconds saved (predicted) 0.0" in shown
    assert "predicted slower" not in shown  # did not happen
    assert "tokens from disk 640" in shown
    assert "hidden states: 2 layers K and V: 1 layer" in shown


def test_a_directory_that_takes_nothing_new_is_told() -> None:
    tier = state()
    tier["disk"]["directories"][0] |= {"reason": "<nothing> new is stored", "takes_writes": False}
    html = tier_html(tier_look(tier=tier))
    assert '<p class="lack">/a: healthy: &lt;nothing&gt; new is stored</p>' in html


def test_every_result_of_a_restore_has_a_name() -> None:
    assert set(_RESULT_NAMES) == set(events_of("restores").values())
    html = tier_html(tier_look(tier=state(restore__failed_on_another_rank=3)))
    assert '<div class="line bad"><span>failed on another rank</span><b>3</b></div>' in html


def test_seconds_saved() -> None:
    measures = {"restore.saved_seconds": {"count": 9, "sum": 1234.56}}
    shown = text_of(tier_html(tier_look(tier=state() | {"measures": measures})))
    assert "seconds saved (predicted) 1,234.6" in shown


def test_without_a_disk_tier() -> None:
    assert "--hcache-dirs" in tier_html(tier_look(tier=state() | {"disk": None}))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({}, "No restore ended yet"),
        ({"queue": 0.0, "read": 0.024, "project": 3.0}, "reading 12 ms writing K and V 1.50 s"),
    ],
)
def test_phases(seconds: dict[str, float], said: str) -> None:
    measures = {f"restore.{phase}_seconds": {"count": 2, "sum": sum_s} for phase, sum_s in seconds.items()}
    shown = text_of(tier_html(tier_look(tier=state() | {"measures": measures})))
    assert said in shown
    assert "waiting to begin" not in shown


def test_the_strip_has_a_cell_a_layer() -> None:
    html = strip_html((Method.KV,) * 2 + (Method.HIDDEN,) * 6)
    assert re.findall(r'class="cell c-(\w+)"', html) == ["kv"] * 2 + ["hidden"] * 6
    assert 'aria-label="8 layers; hidden states: 6 layers, K and V: 2 layers"' in html


def test_results_are_those_of_the_metric() -> None:
    assert events_of("restores")["restore.declined_slower"] == "predicted_slower"


@pytest.mark.parametrize(
    ("reach", "said"),
    [(Reach.UP, ""), (Reach.UNKNOWN, ""), (Reach.AWAY, "conversations stay"), (Reach.BUSY, "busy")],
)
def test_trouble(reach: Reach, said: str) -> None:
    shown = trouble_text(Look(reach=reach, problem="http://here cannot be reached"))
    assert bool(shown) == bool(said)
    assert said in shown
