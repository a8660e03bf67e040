"""Profiles: curves of tokens, fitted or counted, and their JSON form."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_hcache.plan.costs import Hardware
from sglang_hcache.plan.curves import CostCurve, fit_curve
from sglang_hcache.plan.profile import Profile, ProfileSource, TierCurves, analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES
from sglang_hcache.plan.stored import PLANNED_TOKENS, planned_costs

HARDWARE = Hardware(flops=2e14, io_bytes_per_s=26e9)
coefficients = st.floats(0, 1) | st.sampled_from([0.0, 1e-12])


def profile() -> Profile:
    made = analytic_profile(NAMED_SHAPES["llama2-7b"], HARDWARE)
    fast = TierCurves(
        hidden=CostCurve(per_token_s=1e-9, r_squared=0.99), kv=CostCurve(per_token_s=2e-9), contention=0.5
    )
    return replace(
        made,
        source=ProfileSource.MEASURED,
        machine="a machine",
        tiers={**made.tiers, "host": fast},
        token_range=(64, 8192),
    )


def test_tokens_in_two_tiers_are_read_one_after_the_other():
    both = profile().costs({"disk": 512, "host": 128})
    disk, host = profile().costs({"disk": 512, "host": 0}), profile().costs({"host": 128})
    assert both.io_hidden_s == pytest.approx(disk.io_hidden_s + host.io_hidden_s)
    assert both.io_kv_s == pytest.approx(disk.io_kv_s + host.io_kv_s)
    assert both.compute_hidden_s == pytest.approx(profile().costs({"host": 640}).compute_hidden_s)


def test_contention_counts_for_as_long_as_its_tier_is_read():
    assert profile().costs({"disk": 512}).contention == 0
    assert profile().costs({"host": 128}).contention == pytest.approx(0.5)
    both, host = profile().costs({"disk": 512, "host": 128}), profile().costs({"host": 128})
    assert both.contention == pytest.approx(0.5 * host.io_kv_s / both.io_kv_s)
    assert both.scaled(io=2.0).contention == both.contention


def test_a_tier_that_is_slower_takes_longer_and_contends_as_before():
    host, disk = profile().costs({"host": 128}), profile().costs({"disk": 512})
    both = profile().costs({"host": 128, "disk": 512}, slower={"disk": 3.0})
    assert both.io_kv_s == pytest.approx(host.io_kv_s + 3 * disk.io_kv_s)
    assert both.io_hidden_s == pytest.approx(host.io_hidden_s + 3 * disk.io_hidden_s)
    assert both.contention == profile().costs({"host": 128, "disk": 512}).contention


@pytest.mark.parametrize(("measured", "assumed"), [(0.0, 0.0), (0.4, 0.6), (0.9, 1.0)])
def test_what_is_stored_is_chosen_for_more_contention_than_was_measured(measured, assumed):
    made = profile()
    disk = replace(made.tiers["disk"], contention=measured)
    made = replace(made, tiers={**made.tiers, "disk": disk})
    planned = planned_costs(made)
    assert planned.contention == pytest.approx(assumed)
    assert replace(planned, contention=0) == replace(made.costs({"disk": PLANNED_TOKENS}), contention=0)
    assert planned_costs(made, "host").contention == 0.75


def test_json_round_trip():
    assert Profile.from_json(profile().to_json()) == profile()
    data = json.loads(profile().to_json())
    assert (data["format"], data["source"], data["model"]["ffn"]) == (1, "measured", "gated")
    assert data["versions"].keys() == {"sglang-hcache"}


@given(fixed=coefficients, linear=coefficients, squared=coefficients, r_squared=st.none() | st.floats(-1, 1))
def test_json_keeps_every_number(fixed, linear, squared, r_squared):
    curve = CostCurve(fixed_s=fixed, per_token_s=linear, per_token_squared_s=squared, r_squared=r_squared)
    assume(fixed or linear or squared)  # recomputing is not for nothing
    made = profile()
    made = replace(made, compute=replace(made.compute, recompute=curve))
    assert Profile.from_json(made.to_json()) == made


def _put(data, path, value):
    *folders, last = path.split(".")
    for folder in folders:
        data = data[folder]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "format must be 1, got 2"),
        ("source", "guessed", "source: it must be 'measured' or 'analytic', got 'guessed'"),
        ("machine", 7, "machine: it must be a valid string, got 7"),
        ("machine", "a\x1b[2Jb", r"machine and tiers must have printable names, got 'a\\x1b\[2Jb'"),
        (
            "tiers.a\nb",
            {"hidden": {"per_token_s": 1}, "kv": {"per_token_s": 1}},
            r"printable names, got 'a\\nb'",
        ),
        ("model.name", "a\rb", r"model: name must be a printable text that is not empty, got 'a\\rb'"),
        ("extra", 1, "extra is unknown"),
        ("a\x1bb", 1, r"a\\x1bb is unknown"),
        ("tiers.disk.kv.extra", 1, "tiers.disk.kv.extra is unknown"),
        ("model.num_layers", True, "model.num_layers: it must be a valid integer, got True"),
        ("model.num_layers", 0, "model: num_layers must be a positive whole number"),
        ("model.num_layers", 1025, "model: num_layers must be a positive whole number up to 1,024, got 1025"),
        pytest.param(
            *("model.hidden_size", 10**400, r"hidden_size must be .* up to 10,000,000, got 10{5,20}\.\.\."),
            id="digits",
        ),
        ("model.ffn", "wide", "model.ffn: it must be 'plain' or 'gated', got 'wide'"),
        ("model", None, "model: it must be an object, got None"),
        ("tiers", {}, "tiers must name at least one tier"),
        ("tiers.disk.hidden.per_token_s", -1, "tiers.disk.hidden: per_token_s must be a number of seconds"),
        ("tiers.disk.kv.per_token_s", 1e308, "kv: per_token_s must be .* from 0 to 1,000,000, got 1e\\+308"),
        ("compute.recompute.per_token_squared_s", 1e307, "recompute: per_token_squared_s must be"),
        ("tiers.disk.kv.per_token_s", "1", "tiers.disk.kv.per_token_s: it must be a valid number, got '1'"),
        ("tiers.disk.contention", 1.5, "tiers.disk: contention must be from 0 to 1, got 1.5"),
        ("tiers.disk.contention", "1", "tiers.disk.contention: it must be a valid number"),
        ("tiers.disk.kv.per_token_squared_s", 1e-9, "only recomputing has a squared term"),
        ("compute.hidden.per_token_squared_s", 1e-9, "compute: hidden: per_token_squared_s must be 0"),
        ("tiers.host.kv.per_token_s", 0, "tiers.host: kv: it must take some time, and all numbers are 0"),
        ("compute.recompute", {"per_token_s": 0}, "compute: recompute: it must take some time"),
        ("compute.kv", 3, "compute.kv: it must be an object, got 3"),
        ("compute.kv", {}, "compute.kv.per_token_s is missing"),
        ("compute", {}, "compute.hidden is missing; compute.kv is missing; compute.recompute is"),
        ("compute.recompute.r_squared", 1.5, "r_squared must be a number up to 1"),
        ("compute.recompute.fixed_s", float("nan"), "fixed_s must be a number"),
        pytest.param("tiers.host.kv.per_token_s", 10**400, "tiers.host.kv: .* got inf", id="1e400"),
        ("token_range", [64], "token_range.1 is missing"),
        ("token_range", [64, 128.0], "token_range.1: it must be a valid integer, got 128.0"),
        ("token_range", [65, 64], "token_range must be"),
        ("versions", [], "versions: it must be an object"),
    ],
)
def test_damaged_file_says_what_is_wrong(path, value, message):
    data = json.loads(profile().to_json())
    _put(data, path, value)
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 100_000, "[" * 100_000 + "]" * 100_000])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is JSON's own, or names the format
        Profile.from_json(text)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"tape": 64}, "tier 'tape' is not in the profile; it has disk, host"),
        ({"disk": -1}, "-1 tokens"),
        ({"disk": 0}, "at least one token"),
        ({}, "at least one token"),
    ],
)
def test_costs_of_no_such_tokens(tokens, message):
    with pytest.raises(ValueError, match=message):
        profile().costs(tokens)


LENGTHS = [64, 256, 1024, 4096, 16384]


@given(fixed=st.floats(0, 1e-2), linear=st.floats(1e-8, 1e-4), squared=st.floats(0, 1e-8))
def test_fit_finds_the_curve_that_made_the_times(fixed, linear, squared):
    truth = CostCurve(fixed_s=fixed, per_token_s=linear, per_token_squared_s=squared)
    found = fit_curve(LENGTHS, [truth.seconds(n) for n in LENGTHS], quadratic=True)
    for n in (100, 3000, 12000):
        assert found.seconds(n) == pytest.approx(truth.seconds(n), rel=1e-5)
    assert found.r_squared == pytest.approx(1.0)


def test_pieces_behind_a_prefix_are_fitted_with_the_prefixes() -> None:
    truth = CostCurve(fixed_s=1e-3, per_token_s=1e-5, per_token_squared_s=1e-9)
    pieces = [(64, 0), (512, 0), (2048, 0), (512, 2048)]
    times = [truth.seconds(n, start) for n, start in pieces]
    found = fit_curve([n for n, _ in pieces], times, starts=[start for _, start in pieces], quadratic=True)
    assert found.seconds(2048, 6000) == pytest.approx(truth.seconds(2048, 6000), rel=1e-5)


def test_fit_has_no_negative_coefficient():
    """Times that grow more slowly at first would give a negative start."""
    curve = fit_curve([64, 128, 256, 512], [1e-3, 3e-3, 7e-3, 15e-3])
    assert curve.fixed_s == 0
    assert curve.per_token_s > 0
    assert 0.8 < curve.r_squared < 1


def test_fit_of_noise_is_near():
    times = [1.02, 1.97, 4.1, 7.9]
    curve = fit_curve([100, 200, 400, 800], times)
    assert curve.per_token_s == pytest.approx(0.01, rel=0.03)
    assert curve.per_token_squared_s == 0


@pytest.mark.parametrize(
    ("n", "seconds"),
    [
        ([64], [1.0]),
        ([64, 64], [1.0, 2.0]),
        ([64, 128], [1.0]),
        ([64, 128], [1.0, 0.0]),
        ([0, 64], [1.0, 1.0]),
    ],
)
def test_fit_refuses(n, seconds):
    with pytest.raises(ValueError, match=r"different lengths|positive"):
        fit_curve(n, seconds)
