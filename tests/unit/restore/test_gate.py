"""Which restores are started: by measured costs, and by what restores turn out to take."""

from __future__ import annotations

import pytest

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.restore.gate import MeasuredCosts, Prediction, RestoreGate

LAYERS = 10


def gate(*, host: float = 1e-6, disk: float | None = 4e-6, restore: float = 1e-6) -> RestoreGate:
    """Recomputing takes 5 ms and 20 us a token; one layer's reads and restores as given, seconds a token."""
    read = {"host": CostCurve(per_token_s=host)}
    if disk is not None:
        read["disk"] = CostCurve(per_token_s=disk)
    costs = MeasuredCosts(read, CostCurve(per_token_s=restore), CostCurve(fixed_s=0.005, per_token_s=20e-6))
    return RestoreGate(costs, [Method.HIDDEN] * LAYERS)


def predict(gate: RestoreGate, host: int, disk: int, start: int = 0) -> Prediction:
    found = gate.predict({"host": host, "disk": disk}, start)
    assert found is not None
    return found


def test_the_slower_resource_decides_and_the_pipeline_has_to_fill() -> None:
    assert predict(gate(), 1024, 0).restore_s == pytest.approx(0.002 + 1024 * (LAYERS + 1) * 1e-6)
    from_disk = predict(gate(), 0, 1024)
    assert from_disk.restore_s == pytest.approx(0.002 + 1024 * (LAYERS * 4e-6 + 1e-6))
    assert from_disk.recompute_s == pytest.approx(0.005 + 1024 * 20e-6)
    assert predict(gate(), 512, 512).slowest_tier == "disk"


def test_a_restore_that_would_be_slower_is_not_started() -> None:
    assert gate().pays(predict(gate(), 1024, 0), 0.0)
    assert not gate().pays(predict(gate(), 0, 1024), 0.0)
    assert not gate().pays(predict(gate(), 1024, 0), 0.020), "it would wait for others too long"


def test_a_minimum_length_falls_out_of_the_costs() -> None:
    slow_start = gate(restore=1.5e-6)
    lengths = [64 * count for count in range(1, 200)]
    pays = [slow_start.pays(predict(slow_start, length, 0), 0.0) for length in lengths]
    assert all(pays), "recomputing has a fixed cost of 5 ms here"
    costs = MeasuredCosts(
        {"host": CostCurve(per_token_s=1e-6)}, CostCurve(per_token_s=1e-6), CostCurve(per_token_s=20e-6)
    )
    no_fixed_cost = RestoreGate(costs, [Method.HIDDEN] * LAYERS)
    pays = [no_fixed_cost.pays(predict(no_fixed_cost, length, 0), 0.0) for length in lengths]
    assert not pays[0]
    assert pays == sorted(pays), "from some length on it pays"
    assert pays[-1]


def test_a_tier_that_was_not_measured_is_not_judged() -> None:
    assert gate(disk=None).predict({"host": 64, "disk": 64}, 0) is None
    assert gate(disk=None).predict({"host": 64, "disk": 0}, 0) is not None
    assert gate().predict({"host": 0, "disk": 0}, 0) is None


def test_drift_is_followed_and_one_outlier_is_not() -> None:
    outlier = gate()
    before = predict(outlier, 1024, 0).restore_s
    outlier.observe(predict(outlier, 1024, 0), 100.0)
    assert predict(outlier, 1024, 0).restore_s < 1.2 * before
    drift = gate()
    for _ in range(30):
        drift.observe(predict(drift, 1024, 0), 3 * before)
    assert predict(drift, 1024, 0).restore_s == pytest.approx(3 * before, rel=0.15)
    assert predict(drift, 0, 1024).restore_s == predict(gate(), 0, 1024).restore_s, (
        "the other tier is another matter"
    )


def test_a_gate_that_closed_opens_again() -> None:
    """Without restores nothing is observed: what is not started makes the estimate fall back to the measurement."""
    closed = gate()
    for _ in range(30):
        closed.observe(predict(closed, 1024, 0), 1.0)
    assert not closed.pays(predict(closed, 1024, 0), 0.0)
    assert any(closed.pays(predict(closed, 1024, 0), 0.0) for _ in range(1000))
