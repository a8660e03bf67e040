"""Options of the benchmarks: wrong ones are named in one line, with exit status 2, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS

Import = Callable[[str], Any]


def test_options_are_read(bench: Import) -> None:
    assert bench("common.options").parse_numbers("--alphas", "0, 1,0.5,1", low=0, high=2) == (0.0, 1.0, 0.5)
    parse_capacity = bench("serving.options").parse_capacity
    assert parse_capacity("--host-size", "2.5").bytes_for(100) == 250
    assert parse_capacity("--host-size", "2MiB").bytes_for(100) == 2 * 2**20
    assert bench("serving.servers").parse_methods("kv, auto,kv") == ("kv", "auto")


def test_a_quick_run_has_a_time_limit(bench: Import) -> None:
    time_limit_s = bench("serving.options").time_limit_s
    assert time_limit_s(3, quick=True) == time_limit_s(3, quick=False) == 180
    assert time_limit_s(None, quick=True) < 120
    assert time_limit_s(None, quick=False) is None


def test_everyone_is_first_in_turn(bench: Import) -> None:
    in_turn = bench("common.turns").in_turn
    names = {"a": 1, "b": 2, "c": 3}
    orders = [in_turn(names, number) for number in range(6)]
    assert [order[0] for order in orders[:3]] == list("abc")


@pytest.mark.parametrize("count", range(1, 8))
def test_nobody_always_follows_the_same_one(bench: Import, count: int) -> None:
    names = range(count)
    orders = [bench("common.turns").in_turn(names, number) for number in range(count * (1 + count % 2))]
    assert all(sorted(order) == [*names] for order in orders)
    places = Counter((place, name) for order in orders for place, name in enumerate(order))
    followers = Counter(pair for order in orders for pair in pairwise(order))
    assert len(set(places.values())) == 1
    assert len(followers) == count * (count - 1)
    assert len(set(followers.values())) <= 1


@pytest.mark.parametrize("text", ["", "x", "100", "64,", "0"])
def test_wrong_lengths_are_refused(bench: Import, text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        bench("common.options").parse_whole_numbers("--lengths", text, low=128, multiple=CHUNK_TOKENS)


@pytest.mark.parametrize("text", ["", "ram", "host:5MB", "disk:fast", "disk:0", "host,"])
def test_wrong_tiers_are_refused(bench: Import, text: str) -> None:
    with pytest.raises(ConfigError, match="--tiers"):
        bench("restoring.settings").parse_tiers("--tiers", text)


def test_right_ones_are_taken(bench: Import) -> None:
    numbers = bench("common.options").parse_whole_numbers
    assert numbers("--lengths", "128,1024", low=128, multiple=CHUNK_TOKENS) == (128, 1024)
    tiers = bench("restoring.settings").parse_tiers("--tiers", "host, disk:500MB")
    assert tiers == ("host", "disk:500MB")


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        ("zipf_replay", ["--alphas", "0,x"], "--alphas: 'x' is not allowed"),
        ("zipf_replay", ["--alphas", "-1"], "--alphas: '-1' is not allowed"),
        (
            "zipf_replay",
            ["--methods", "kv,magic"],
            "--methods: 'magic' is not allowed; allowed: recompute, kv",
        ),
        ("zipf_replay", ["--dataset", "/nonexistent"], "--dataset: /nonexistent does not exist"),
        ("zipf_replay", ["--device-contexts", "0"], "--device-contexts: 0 is not allowed"),
        ("zipf_replay", ["--host-size", "2 apples"], "--host-size: '2 apples' is not allowed"),
        ("zipf_replay", ["--disk-size", "-3"], "--disk-size: '-3' is not allowed"),
        (
            "zipf_replay",
            ["--model-path", "/nonexistent"],
            "--model-path: cannot read /nonexistent/config.json",
        ),
        ("zipf_replay", ["--out", "/dev/null/x"], "--out: cannot write into /dev/null/x"),
        (
            "zipf_replay",
            ["--scale", "1", "--dataset", "/nonexistent"],
            "--scale: is for generated documents",
        ),
        ("multiturn", ["--time-limit", "0"], "--time-limit: 0 is not allowed"),
        ("multiturn", ["--rates", "0"], "--rates: '0' is not allowed"),
        ("multiturn", ["--methods", ""], "--methods: '' is not allowed"),
        ("multiturn", ["--scale", "-1"], "--scale: -1 is not allowed"),
        ("multiturn", ["--dataset", "/nonexistent"], "--dataset: /nonexistent is not a file"),
        ("burst", ["--prompts", "30,many"], "--prompts: '30,many' is not a list of whole numbers"),
        ("burst", ["--device-contexts", "0"], "--device-contexts: 0 is not allowed"),
        ("burst", ["--methods", "kv,magic"], "--methods: 'magic' is not allowed"),
        ("burst", ["--host-size", "2 apples"], "--host-size: '2 apples' is not allowed"),
        ("overhead", ["--histories", "1024,x"], "--histories: '1024,x' is not a list of whole numbers"),
        ("overhead", ["--histories", "8"], "--histories: 8 is not allowed; at least 64"),
        ("overhead", ["--host-size", "2 apples"], "--host-size: '2 apples' is not a size"),
        ("overhead", ["--dtype", "int4"], "--dtype: 'int4' is not allowed"),
        ("restore_speed", ["--dtype", "int4"], "--dtype: 'int4' is not allowed"),
        ("overhead", ["--out", "/dev/null/x"], "--out: cannot write into /dev/null/x"),
        ("ablations", ["--kv-layers", "4", "--layers", "4"], "--kv-layers: 4 leaves none"),
        (
            "ablations",
            ["--hidden", "100", "--heads", "3"],
            "--hidden: 100 is not a multiple",
        ),
        ("ablations", ["--lengths", "100"], "--lengths: 100 is not allowed"),
        ("ablations", ["--out", "/dev/null/x"], "--out: cannot write into /dev/null/x"),
        ("restore_speed", ["--tiers", "ram"], "--tiers: 'ram' is no tier"),
        (
            "restore_speed",
            ["--out", "/dev/null/x"],
            "--out: cannot write into /dev/null/x",
        ),
        ("store_io", ["--size", "much"], "--size: 'much' is not a size"),
        ("store_io", ["--block", "0"], "--block: '0' is not allowed; it must be a multiple of 4,096 bytes"),
        ("store_io", ["--block", "64KiB", "--block", "1000B"], "--block: '1000B' is not allowed"),
    ],
)
def test_a_wrong_option_is_named(
    bench: Import, tmp_path: Path, program: str, arguments: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(bench(program).app, [*arguments, "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{program}: error: {complaint}" in result.stderr
    assert not result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "arguments", "longest"),
    [
        ("restore_speed", ["--lengths", "64,65536"], 65536),
        ("ablations", ["--lengths", "128,65536"], 65536),
        ("ablations", ["--prefill", "65536"], 65536),
        ("ablations", ["--steps", "65536"], 65536 + 256 + CHUNK_TOKENS),
    ],
)
def test_a_model_has_positions_for_the_longest_prompt(
    bench: Import, monkeypatch: pytest.MonkeyPatch, program: str, arguments: list[str], longest: int
) -> None:
    module, models = bench(program), []

    def carry_out(_: str, measure: Any, *_more: Any, **_options: Any) -> None:
        models.extend(each for each in measure.args if isinstance(each, TinyModel))
        models.extend(each.model for each in measure.args if hasattr(each, "model"))

    monkeypatch.setattr(module, "carry_out", carry_out)
    monkeypatch.setattr(module, "restart_with_cpu_runtime", lambda: None)
    result = CliRunner().invoke(module.app, arguments)
    assert result.exit_code == 0, result.output
    (model,) = models
    assert model.max_position >= longest


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("ablations", ["storage"]),
        ("ablations", ["--rounds", "0"]),
        *(
            (name, ["--dir", "/nonexistent"])
            for name in ("zipf_replay", "overhead", "restore_speed", "store_io")
        ),
    ],
)
def test_a_wrong_use_is_refused(bench: Import, program: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(bench(program).app, arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert not result.stdout
