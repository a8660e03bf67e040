"""Comparisons of methods: answers compared, rows, servers, and what is written."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from sglang_hcache.cli.server.answers import TokenSources

Import = Callable[[str], Any]


def answer(bench: Import, **changes: Any) -> Any:
    sources = TokenSources(device=10, host=20, disk=30, recomputed=40)
    fields = {"tokens": (1, 2, 3), "logprobs": (-1.0, -2.0, -3.0), "sources": sources, "ttft_s": 2.0}
    fields["likely"] = ({9: -2.0},) * 3
    return bench("serving.token_client").TokenAnswer(
        **{**fields, "gaps_s": (0.1, 0.3), "total_s": 2.5, **changes}
    )


@pytest.mark.parametrize(
    ("tokens", "logprobs", "equal", "tie"),
    [
        ((1, 2, 3), (-1.0, -2.0, -3.0), True, False),
        ((1, 2, 3), (-1.0, -2.0005, -3.0), True, False),
        ((1, 2, 3), (-1.0, -2.01, -3.0), False, False),
        ((1, 2, 3), (-1.0, math.nan, -3.0), False, False),
        ((1, 2), (-1.0, -2.0), False, False),
        ((1, 9, 3), (-1.0, -2.5, -3.0), False, False),
        ((), (), False, False),
    ],
)
def test_answers_are_compared_token_by_token(
    bench: Import, tokens: Any, logprobs: Any, equal: bool, tie: bool
) -> None:
    found = bench("serving.token_client").compare(
        answer(bench, tokens=tokens, logprobs=logprobs), answer(bench), 1e-3
    )
    assert (found.is_equal, found.is_tie) == (equal, tie)


@pytest.mark.parametrize(
    ("own", "others", "is_tie"),
    [
        ({2: -2.0004}, {9: -2.0004}, True),  # each has the other's token right behind its own
        ({7: -2.0002, 2: -2.0004}, {7: -2.0001, 9: -2.0004}, True),  # a third is as probable
        ({2: -2.5}, {9: -2.0004}, False),
        ({2: -2.0004}, {9: -2.5}, False),
        ({7: -2.0004}, {9: -2.0004}, False),
        ({2: -2.0004}, {7: -2.0004}, False),
        ({}, {}, False),
    ],
)
def test_a_tie_is_one_to_both(bench: Import, own: Any, others: Any, is_tie: bool) -> None:
    """Where answers part, each as sure of its own token, one of them is wrong if it does not know the other's."""
    one = answer(bench, tokens=(1, 9, 9), logprobs=(-1.0, -2.0, -9.0), likely=({5: -3.0}, own, {5: -9.5}))
    other = answer(bench, likely=({5: -3.0}, others, {5: -3.5}))
    found = bench("serving.token_client").compare(one, other, 1e-3)
    assert (found.is_equal, found.is_tie) == (is_tie, is_tie)


def test_likely_tokens_are_read_with_the_answer(bench: Import) -> None:
    reader = bench("serving.token_client")._Reader()
    for tokens, best in (
        ([[-0.1, 4, None]], [[[-0.1, 4], [-2.0, 6]]]),
        ([[-1.0, 5, None]], [[[-1.0, 8], [-1.0, 5]]]),
    ):
        meta = {"output_token_logprobs": tokens, "output_top_logprobs": best, "completion_tokens": 2}
        reader.take("data: " + json.dumps({"meta_info": {**meta, "prompt_tokens": 3}}))
    found = reader.answer()
    assert (found.tokens, found.likely) == ((4, 5), ({4: -0.1, 6: -2.0}, {8: -1.0, 5: -1.0}))


def test_rows_have_ratios_times_and_speedups(bench: Import) -> None:
    measure = bench("serving.comparison").Measured
    measured = {
        "kv": [measure([answer(bench), answer(bench, ttft_s=4.0)], 5.0)],
        "recompute": [measure([answer(bench, ttft_s=6.0)] * 2, 10.0)],
        "auto": [measure([answer(bench), answer(bench, tokens=(7, 2, 3), logprobs=(0.0, 0, 0))])],
    }
    methods = ("kv", "recompute", "auto", "lmcache")
    rows = bench("serving.comparison").rows_of(
        {"alpha": 1.0}, methods, measured, {"lmcache": "not available here: why"}
    )
    kv, recompute, _, absent = rows
    assert [row["method"] for row in rows] == list(methods)
    assert len({tuple(row) for row in rows}) == 1  # the same fields
    assert (kv["alpha"], kv["requests"], kv["prompt_tokens"], kv["restored_tokens"]) == (1.0, 2, 200, 100)
    assert (kv["device_hit_ratio"], kv["host_hit_ratio"], kv["disk_hit_ratio"]) == (0.1, 0.2, 0.3)
    assert (kv["ttft_mean_s"], kv["ttft_p50_s"], kv["round_speedup_over_recompute"]) == (3.0, 3.0, 2.0)
    assert kv["tbt_mean_s"] == pytest.approx(0.2)
    assert (kv["requests_per_s"], kv["tokens_per_s"]) == (0.4, 206 / 5)
    assert recompute["round_speedup_over_kv"] == 0.5
    assert kv["rounds"] == [{"ttft_mean_s": 3.0, "busy_s": 5.0, "restored_requests": 2}]
    assert [row["unequal"] for row in rows] == [0, 0, 1, None]
    assert bench("common.gathered").count_unequal(rows) == 1
    assert (absent["requests"], absent["note"], absent["ttft_mean_s"]) == (0, "not available here: why", None)
    alone = bench("serving.comparison").rows_of({"alpha": 0}, ("lmcache",), {}, {"lmcache": "why"})
    assert alone == [{"alpha": 0, "method": "lmcache", "requests": 0, "note": "why"}]


def test_percentiles(bench: Import) -> None:
    found = bench("serving.latency").Latency.of([float(number) for number in range(101)])
    assert found.fields("x") == {"x_mean_s": 50.0, "x_p50_s": 50.0, "x_p95_s": 95.0, "x_p99_s": 99.0}
    assert set(bench("serving.latency").Latency.of([]).fields("x").values()) == {None}


def test_methods_that_cannot_run_here_say_why(bench: Import) -> None:
    why = bench("serving.servers").why_unavailable
    assert [why(method, gpu=False) for method in bench("serving.servers").OWN_METHODS] == [None] * 5
    for method in ("hicache", "hicache-file", "lmcache"):
        assert why(method, gpu=False).startswith("not available here: ")
    assert why("lmcache", gpu=True).startswith("not available here: ")
    assert why("hicache", gpu=True) is why("hicache-file", gpu=True) is why("auto", gpu=True) is None


def test_servers_have_room_for_the_longest_context(bench: Import) -> None:
    common = {"longest_context": 1000, "disk_bytes": 10**9, "kv_token_bytes": 4096, "quick": False}
    make = bench("serving.servers").sizes_for
    small = make(device_contexts=0.5, mean_context=500.0, requests_at_once=False, host_bytes=1, **common)
    assert small.pool_tokens > 1000
    assert small.host_bytes - small.staging_bytes >= 34 * 64 * 4096
    assert small.staging_bytes == 2 * 1064 * 4096
    large = make(device_contexts=8, mean_context=500.0, requests_at_once=True, host_bytes=10**9, **common)
    assert large.staging_bytes == 2 * (4096 + 64) * 4096
    assert large.pool_tokens == 4000
    assert large.host_bytes > 10**9
    assert all(2 * size.staging_bytes <= size.host_bytes for size in (small, large))


EACH_REPORT = pytest.mark.parametrize(
    ("report", "name", "key"),
    [
        ("serving.zipf_report", "zipf_replay", "alpha"),
        ("serving.multiturn_report", "multiturn", "rate"),
        ("serving.burst_report", "burst", "at_once"),
    ],
)


def results(bench: Import, key: str, methods: tuple[str, ...] = ("recompute", "auto")) -> dict[str, Any]:
    """Of ``methods`` and of ``hicache``, which was not measured."""
    measured = {name: [bench("serving.comparison").Measured([answer(bench)] * 3, 5.0)] for name in methods}
    notes = {"hicache": "not available here: why"}
    rows = [
        row
        for value in (0.0, 1.0)
        for row in bench("serving.comparison").rows_of({key: value}, (*methods, "hicache"), measured, notes)
    ]
    return {
        **bench("common.header").make_header("test"),
        "model": {"name": "random", "architecture": "Llama", "layers": 2, "hidden": 64, "dtype": "float32"},
        "workload": {
            "source": "test", "documents": 3, "tasks": ["a"], "mean_context_tokens": 100.0, "conversations": 3,
            "requests": 6, "left_out": 1, "cut_documents": 2, "mean_question_tokens": 5.0, "mean_answer_tokens": 2.0,
            "mean_input_tokens": 10.0, "mean_output_tokens": 20.0,
        },
        "settings": {"history": 512, "new_tokens": 32, "answer_tokens": 8},
        "sizes": {"pool_tokens": 200},
        "rates_left_out": [4.0],
        "rows": rows,
    }  # fmt: skip


@EACH_REPORT
def test_results_are_shown_and_written(
    bench: Import, tmp_path: Path, report: str, name: str, key: str
) -> None:
    data = results(bench, key)
    console = Console(width=200, record=True, quiet=False, file=(tmp_path / "shown").open("w"))
    bench(report).show(data, console)
    text = console.export_text()
    assert "hicache: not available here: why" in text
    assert "All 6 answers equal those of recompute: same tokens (0 only up to a tie)" in text
    if key == "at_once":
        assert re.search(r"5\.00 - 5\.00 s\s+│\s+3 ", text), "the last answer, and prompts that were restored"
    bench(report).write(tmp_path, data)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == data
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(float(line[key]), line["method"]) for line in lines] == [
        (row[key], row["method"]) for row in data["rows"]
    ]
    assert "rounds" not in lines[0], "a single value in each cell"
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@EACH_REPORT
@pytest.mark.parametrize(
    ("methods", "baseline"),
    [
        (("auto", "kv", "recompute"), "recompute"),
        (("kv", "auto"), "kv"),
        (("hidden", "auto"), None),
    ],
)
def test_speedups_are_over_a_baseline_or_left_out(
    bench: Import,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: str,
    name: str,
    key: str,
    methods: tuple[str, ...],
    baseline: str | None,
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    bench(report).write(tmp_path, results(bench, key, methods))
    (figure,) = drawn
    titles = [axes.get_title() for axes in figure.axes]
    of_speedups = [f"Speed-up of mean TTFT over {baseline}"] if baseline else []
    assert [title for title in titles if "Speed-up" in title] == of_speedups
    assert len(titles) == {"multiturn": 3}.get(name, 2) + len(of_speedups)
    assert len({axes.get_xlabel() for axes in figure.axes}) == 1
    assert all(axes.lines or axes.patches for axes in figure.axes)


def ended_early(bench: Import, key: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """Results of ``recompute``, ``kv`` and ``lmcache``: one load, and of the second only ``methods``."""
    module = bench("serving.comparison")
    found = bench("common.gathered").Gathered()
    found.header = {name: value for name, value in results(bench, key).items() if name != "rows"}
    notes = {"lmcache": "not available here: why"}
    comparison = module.Comparison(found, key, (0.5, 1.0, 2.0), ("recompute", "kv", "lmcache"), notes)
    comparison.begin()
    assert not found.measured
    for value, there in ((0.5, ("recompute", "kv")), (1.0, methods)):
        comparison.add(value, [{name: module.Measured([answer(bench)] * 3, 5.0) for name in there}])
    return found.results()  # type: ignore[no-any-return]


def test_one_method_alone_is_compared_with_nobody(bench: Import, tmp_path: Path) -> None:
    rows = [row for row in results(bench, "alpha")["rows"] if row["method"] != "auto"]
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
    bench("serving.report").print_equality(console, rows)
    assert "compared with nobody's" in console.export_text()


@EACH_REPORT
@pytest.mark.parametrize("there", ["recompute", "kv"])
def test_a_method_that_was_not_measured_has_no_row(
    bench: Import, tmp_path: Path, report: str, name: str, key: str, there: str
) -> None:
    data = ended_early(bench, key, (there,))
    other = {"recompute": "kv", "kv": "recompute"}[there]
    assert (data["complete"], data["missing"]) == (False, [f"{key} 1: {other}", f"{key} 2"])
    assert [(row[key], row["method"]) for row in data["rows"]] == [
        *((0.5, method) for method in ("recompute", "kv", "lmcache")),
        (1.0, there),
        (1.0, "lmcache"),
    ]
    alone = data["rows"][3]
    assert (alone[f"round_speedup_over_{there}"], alone[f"round_speedup_over_{other}"]) == (1, None)
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
    bench(report).show(data, console)
    assert "All 3 answers equal those of recompute" in console.export_text()
    bench(report).write(tmp_path, data)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_are_pooled_and_their_ratios_have_an_interval(bench: Import) -> None:
    module = bench("serving.comparison")
    found = bench("common.gathered").Gathered()
    comparison = module.Comparison(found, "alpha", (0.0,), ("recompute", "kv"), {}, rounds=3)
    comparison.begin()
    rounds = [
        {
            "recompute": module.Measured([answer(bench, ttft_s=ttft_s)], 10.0),
            "kv": module.Measured([answer(bench)], 5.0),
        }
        for ttft_s in (4.0, 8.0)
    ]
    comparison.add(0.0, [*rounds, {"kv": module.Measured([answer(bench, ttft_s=100.0)], 100.0)}])
    data = found.results()
    assert data["missing"] == ["alpha 0: 1 rounds"], "a round that one method lacks does not count"
    recompute, kv = data["rows"]
    assert (recompute["requests"], kv["requests"], kv["requests_per_s"]) == (2, 2, 0.2)
    assert (recompute["ttft_mean_s"], kv["ttft_mean_s"]) == (6.0, 2.0)
    assert [kv[f"round_speedup_over_recompute{end}"] for end in ("", "_low", "_high")] == [3.0, 2.0, 4.0]
    assert bench("serving.report").ratio_of_rounds(kv, "recompute") == "3.00 (2.00 to 4.00)"
    assert bench("serving.report").ratio_of_rounds(kv, "kv") == "1.00"


def test_where_no_method_can_run_nothing_is_missing(bench: Import) -> None:
    found = bench("common.gathered").Gathered()
    notes = {"lmcache": "why"}
    bench("serving.comparison").Comparison(found, "alpha", (0.0, 1.0), ("lmcache",), notes).begin()
    data = found.results()
    assert data["complete"]
    assert [(row["alpha"], row["note"]) for row in data["rows"]] == [(0.0, "why"), (1.0, "why")]


def test_the_header_says_what_one_must_know(bench: Import) -> None:
    header = bench("common.header").make_header("name")
    assert header["benchmark"] == "name"
    assert header["machine"]["cores"] >= 1
    assert header["machine"]["processor"]
    assert set(header["versions"]) == {"python", "sglang", "sglang-hcache", "torch"}
    assert "/" not in json.dumps(header["versions"])


def test_a_machine_without_git_has_no_commit_to_tell(
    bench: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench("common.header").commit() is None
