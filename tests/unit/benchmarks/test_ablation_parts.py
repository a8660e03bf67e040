"""What benchmarks/ablations.py counts without a model: shares of layers and tokens, places of rows, Table 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.plan.costs import Hardware, LayerCosts
from sglang_hcache.plan.planner import Split
from sglang_hcache.plan.profile import analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES

SHAPE = NAMED_SHAPES["llama2-7b"]


@pytest.fixture
def parts(bench: Callable[[str], Any]) -> SimpleNamespace:
    names = {
        "splits": "ablation.splits",
        "schedules": "ablation.schedules",
        "report": "ablation.report",
        "rows": "ablation.row_places",
    }
    return SimpleNamespace(**{short: bench(name) for short, name in names.items()})


# -- shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, 1024, 4096, 5056, 16384])
@pytest.mark.parametrize("rounded", [False, True])
def test_tokens_are_shared_out_as_layers_are(parts, length, rounded):
    split = Split(0, 20, 4)
    found = parts.splits.token_splits(length, split, rounded=rounded)
    assert sum(each.total for each in found) == length
    for each in found:
        wanted = each.total * 20 / 24
        assert abs(each.hidden - wanted) <= (CHUNK_TOKENS if rounded else 0.5)
        assert 0 < each.hidden < each.total or each.total == CHUNK_TOKENS
        # Every token is in one form at least, and only a chunk that is shared is in both.
        in_both = each.hidden_chunks - each.first_kv_chunk
        assert in_both == (0 if each.hidden % CHUNK_TOKENS == 0 else 1)
        assert not (rounded and in_both)


@pytest.mark.parametrize("split", [Split(1, 20, 3), Split(0, 24, 0), Split(0, 0, 24)])
def test_only_two_methods_are_shared_out(parts, split):
    with pytest.raises(ValueError, match="shared out"):
        parts.splits.token_splits(1024, split, rounded=False)


def test_host_reads_count_the_same_bytes_for_layers_and_whole_chunks(parts):
    sizes = {Method.HIDDEN: 1024, Method.KV: 2048}
    split = Split(0, 3, 1)
    rounded = parts.splits.token_splits(1024, split, rounded=True)
    by_layers = parts.splits.host_reads(sizes.__getitem__, 4, split, None, 1024)
    by_tokens = parts.splits.host_reads(sizes.__getitem__, 4, split, rounded, 1024)
    assert by_layers == (4, 1024 * (3 * 1024 + 2048))
    assert by_tokens == (8, by_layers[1])
    # 683 and 341 tokens: one chunk is read in both forms.
    shared = parts.splits.token_splits(1024, Split(0, 2, 1), rounded=False)
    extra = parts.splits.host_reads(sizes.__getitem__, 3, Split(0, 2, 1), shared, 1024)[1]
    least = 3 * (shared[0].hidden * 1024 + (1024 - shared[0].hidden) * 2048)
    assert least < extra <= least + 3 * CHUNK_TOKENS * (1024 + 2048)


def costs(tokens: int, io_gb_s: float = 26, fixed_s: float = 0.0) -> LayerCosts:
    hardware = Hardware(flops=197e12, io_bytes_per_s=io_gb_s * 1e9)
    found = analytic_profile(SHAPE, hardware).costs({"disk": tokens})
    return replace(found, io_hidden_s=fixed_s + found.io_hidden_s, io_kv_s=fixed_s + found.io_kv_s)


def test_closed_forms_give_the_same_share_of_layers_and_of_tokens(parts):
    layers, tokens = parts.splits.closed_forms(costs(4096), 32, 4096)
    assert layers == 31
    assert tokens / 4096 == pytest.approx(layers / 32, abs=1 / 32)
    # A slow disk wants layers recomputed: there is no share of K and V.
    assert parts.splits.closed_forms(costs(4096, io_gb_s=5), 32, 4096) == (None, None)


def test_more_reads_make_the_prediction_by_tokens_slower(parts):
    split = parts.splits.choose_split(costs(4096), 32)
    assert split.hidden + split.kv == 32
    assert split.kv >= 1
    assert split.hidden >= 1
    splits = parts.splits.token_splits(4096, split, rounded=False)
    cheap = parts.splits.predicted_by_tokens(costs, splits, 32)
    dear = parts.splits.predicted_by_tokens(lambda n: costs(n, fixed_s=1e-4), splits, 32)
    assert dear == pytest.approx(cheap + 32 * 2e-4, rel=0.2)


# -- rows ----------------------------------------------------------------------------------------


def test_every_row_has_a_place_of_its_own(parts):
    layout = StateLayout((Method.HIDDEN, Method.KV), (4, 8))
    taken = set()
    passes = [RequestRows("a", 0, 5, 100), RequestRows("a", 100, 0, 1), RequestRows("a", 101, 7, 91)]
    for layer, size in enumerate(layout.row_bytes):
        for rows in passes:
            found = list(parts.rows.places(rows, layout, layer))
            assert found[0].first == rows.row
            assert sum(place.count for place in found) == rows.count
            for place in found:
                span = range(place.offset, place.offset + place.count * size)
                assert taken.isdisjoint(span)
                taken.update(span)
    assert taken == set(range(3 * layout.chunk_bytes))  # 192 tokens: the whole of three chunks
    # Chunk 1, layer 1, row 36.
    (place,) = parts.rows.places(RequestRows("a", 100, 0, 1), layout, 1)
    assert place.offset == layout.chunk_bytes + 64 * 4 + 36 * 8


# -- schedules -----------------------------------------------------------------------------------


def test_a_profile_has_a_row_as_well(parts):
    profile = analytic_profile(SHAPE, Hardware(flops=197e12, io_bytes_per_s=26e9))
    row = parts.schedules.measured_row(profile, "disk")
    assert row.stored.recompute == 0
    assert row.stored.num_layers == 32
    assert 1 < row.ratio <= 2


# -- reports -----------------------------------------------------------------------------------


def test_a_report_is_written_for_what_was_measured_only(parts, tmp_path):
    rows = [parts.report.flat("schedules", row) for row in parts.schedules.paper_rows()]
    parts.report.write(tmp_path, {"schedules": rows})
    names = {"ablations.json", "ablations_schedules.csv", "ablations_schedules.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "ablations.json").read_text())["schedules"][2]["printed"]["recompute"] == 8
    assert "8 RE + 40 H" in (tmp_path / "ablations_schedules.csv").read_text()


def test_a_picture_of_restores_is_drawn(bench, tmp_path):
    rows = [
        {"tier": tier, "length": length, "variant": variant, "tokens_per_s": 1e4}
        for tier in ("host", "disk:250MB", "disk:1GB")
        for length in (1024, 2048)
        for variant in ("kv", "auto", "ideal")
    ]
    bench("restoring.figures").draw(tmp_path / "x.png", rows, "a model")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
