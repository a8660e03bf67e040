"""Restores that mix methods: whatever the plan is, restored equals recomputed.

A profile that is written for the test says what things cost, so that the plan of each length is known beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hcache.core.layout import Method, PlanKind
from sglang_hcache.plan.planner import Split, fastest_restore, plan_stored
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.plan.stored import planned_costs
from sglang_hcache.restore.gate import RestoreGate
from tests.e2e.harness import TOLERANCE, TierServer, largest_difference, random_prompt
from tests.e2e.test_serving import assert_same_pool
from tests.made_profiles import made_profile, reads

LAYERS = 6


def write_profile(
    model: Path,
    path: Path,
    *,
    fixed: float,
    hidden: float,
    kv: float,
    project: float,
    run: float,
    kv_dtype_bytes: int = 4,
    disk: float = 1.0,
) -> Profile:
    """Costs of one layer in microseconds: ``fixed`` a read, the others a token. Reads from the disk take ``disk`` times
    as long.
    """
    shape = ModelShape.from_config(json.loads((model / "config.json").read_text()), model.name, "float32")
    host, far = (reads(hidden * cost, kv * cost, fixed * cost) for cost in (1e-6, disk * 1e-6))
    profile = made_profile(
        replace(shape, kv_dtype_bytes=kv_dtype_bytes),
        {"host": host, "disk": far},
        project=project * 1e-6,
        run=run * 1e-6,
    )
    path.write_text(profile.to_json())
    return profile


def recomputed_layers(profile: Profile, kind: PlanKind, length: int) -> int:
    stored = plan_stored(planned_costs(profile), LAYERS, kind)
    return fastest_restore(stored, profile.costs({"host": length}), max_recompute=LAYERS - 1).num_recompute


def serve(
    folder: Path, model: Path, method: str, profile: Path, *more: str, host_size: str = "128MB"
) -> TierServer:
    config = folder / "hcache.yaml"
    # What is saved must not depend on how busy we are.
    config.write_text(f"host_size: {host_size}\nstaging_size: 24MB\n")
    arguments = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "8192"),
        *("--chunked-prefill-size", "512", "--hcache-config", str(config), "--hcache-method", method),
        *("--hcache-dirs", str(folder / "disk"), "--hcache-disk-size", "64MB"),
        *("--hcache-disk-free-floor", "0", "--hcache-profile", str(profile), *more),
    ]
    server = TierServer(folder, arguments)
    (server.switches / "keep_costs").touch()
    return server


@pytest.fixture(scope="module")
def mixed(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TierServer, Profile]]:
    """Multi-head attention: three layers store hidden states and three K and V."""
    folder, model = tmp_path_factory.mktemp("mixed"), tiny_model(layers=LAYERS)
    profile = write_profile(model, folder / "costs.json", fixed=5_000, hidden=2.5, kv=5, project=8, run=30)
    with serve(folder, model, "auto", folder / "costs.json") as server:
        assert "method 3 hidden + 3 kv (auto)" in server.process.log_text()
        yield server, profile


def check_equality(server: TierServer, length: int, expected_layers: int, tier: str = "host") -> None:
    """Restore a prompt of ``length`` tokens by the expected plan, and compare with recomputing it."""
    prompt = random_prompt(length, length)
    whole = (length - 1) // 64 * 64
    recomputed = server.recompute(prompt, rid=f"probe-recomputed-{length}", tokens=16)
    server.ask(prompt)
    server.to_tiers()
    before = server.counter("restore.layers_recomputed")
    restored = server.ask(prompt, rid=f"probe-restored-{length}", tokens=16)
    assert getattr(restored, tier) == whole
    assert server.counter("restore.layers_recomputed") - before == expected_layers
    assert largest_difference(restored, recomputed) <= TOLERANCE
    assert_same_pool(server, f"restored-{length}", f"recomputed-{length}")
    for switch in ["corrupt_restored_key", *(["corrupt_recomputed"] if expected_layers else [])]:
        server.flush_device()
        with server.switched_on(switch):
            wrong = server.ask(prompt, tokens=16)
        assert largest_difference(wrong, recomputed) > TOLERANCE, switch
    server.flush_device()


@pytest.mark.parametrize(("length", "split"), [(150, (3, 3, 0)), (700, (1, 3, 2)), (2500, (0, 3, 3))])
def test_all_three_methods_in_one_restore(
    mixed: tuple[TierServer, Profile], length: int, split: tuple[int, int, int]
) -> None:
    server, profile = mixed
    expected = recomputed_layers(profile, PlanKind.AUTO, (length - 1) // 64 * 64)
    stored = plan_stored(planned_costs(profile), LAYERS, PlanKind.AUTO)
    assert Split.of((Method.RECOMPUTE,) * expected + stored[expected:]) == Split(*split)
    check_equality(server, length, expected)
    server.assert_nothing_left()


def test_a_restore_below_a_prefix_on_the_device(mixed: tuple[TierServer, Profile]) -> None:
    """The recomputed layers of the new part look at the K and V of the part that is there."""
    server, _ = mixed
    prompt = random_prompt(77, 1000)
    recomputed = server.recompute(prompt, rid="probe-recomputed-below", tokens=16)
    server.ask(prompt)
    server.to_tiers()
    server.ask(prompt[:321], tokens=1)
    before = server.counter("restore.layers_recomputed")
    restored = server.ask(prompt, rid="probe-restored-below", tokens=16)
    assert (restored.device, restored.host) == (320, 640)
    assert server.counter("restore.layers_recomputed") > before
    assert largest_difference(restored, recomputed) <= TOLERANCE
    assert_same_pool(server, "restored-below", "recomputed-below")
    server.flush_device()
    server.assert_nothing_left()


def test_what_is_computed_sooner_is_not_restored(mixed: tuple[TierServer, Profile]) -> None:
    """One chunk, which is computed in a single pass while the first read has not ended for long."""
    server, profile = mixed
    gate = RestoreGate(profile, plan_stored(planned_costs(profile), LAYERS), block_tokens=64)
    assert not gate.decide({"host": 64}, 0).pays()
    prompt = random_prompt(65, 65)
    recomputed = server.recompute(prompt, tokens=16)
    server.ask(prompt)
    server.to_tiers()
    before = server.counter("restore.declined_slower")
    again = server.ask(prompt, tokens=16)
    assert again.cached == 0
    assert server.counter("restore.declined_slower") - before == 1
    assert largest_difference(again, recomputed) <= TOLERANCE
    server.flush_device()
    server.assert_nothing_left()


def test_one_method_for_all_layers_restores_only_what_pays(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where recomputing first layers would be faster still."""
    model, costs = tiny_model(layers=LAYERS), tmp_path / "costs.json"
    write_profile(model, costs, fixed=5_000, hidden=2.5, kv=5, project=8, run=30)
    with serve(tmp_path, model, "kv", costs, "--hcache-restore", "faster") as server:
        log = server.process.log_text()
        assert "hcache: predicted for" in log
        assert "layers recomputed" not in log
        for length, restored in ((65, 0), (700, 640)):
            prompt = random_prompt(length, length)
            server.ask(prompt)
            server.to_tiers()
            assert server.ask(prompt).restored == restored
        assert server.counter("restore.declined_slower") == 1
        assert server.counter("restore.layers_recomputed") == 0
        server.assert_nothing_left()


def test_a_slow_disk_under_the_tail_of_a_prefix_does_not_cost_its_head(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Host memory is so small that it keeps the beginning of a prompt when others have come."""
    model, costs = tiny_model(layers=LAYERS), tmp_path / "costs.json"
    write_profile(model, costs, fixed=10, hidden=2.5, kv=5, project=8, run=200, disk=1000)
    prompt = random_prompt(0, 1000)
    more = ("--hcache-restore", "faster")
    with serve(tmp_path, model, "hidden", costs, *more, host_size="48MB") as server:

        def evict_the_tail(seed: int) -> None:
            """What takes all of host memory but for ten chunks comes behind the 15 of ``prompt``."""
            for one in (prompt, random_prompt(seed, 64 * (server.state()["host"]["slots"] - 10) + 1)):
                server.ask(one)
                server.to_tiers()

        recomputed = server.recompute(prompt, rid="probe-recomputed", tokens=16)
        evict_the_tail(1)
        restored = server.ask(prompt, rid="probe-restored", tokens=16)
        assert 0 < restored.host < 960
        assert restored.disk == 0
        assert server.counter("restore.declined_slower") == 0
        assert largest_difference(restored, recomputed) <= TOLERANCE
        assert_same_pool(server, "restored", "recomputed")
        evict_the_tail(2)
        with server.switched_on("always_restore"):
            restored = server.ask(prompt)
        assert restored.host + restored.disk == 960
        assert restored.disk > 0
        server.assert_nothing_left()


def test_grouped_queries_mix_kv_and_recomputation_and_store_no_hidden_states(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also what was saved before a restart, with another plan at each length."""
    model, costs = tiny_model(layers=LAYERS, kv_heads=1), tmp_path / "costs.json"
    profile = write_profile(model, costs, fixed=100, hidden=20, kv=10, project=2, run=20)
    prompt = random_prompt(3, 700)
    with serve(tmp_path, model, "auto", costs) as server:
        log = server.process.log_text()
        assert "hidden states 6.1 KB a token, K and V 3.1 KB a token; method kv (auto)" in log
        lengths = [150, 1500]
        expected = [recomputed_layers(profile, PlanKind.AUTO, (length - 1) // 64 * 64) for length in lengths]
        assert all(expected)
        for length, layers in zip(lengths, expected, strict=True):
            check_equality(server, length, layers)
        recomputed = server.recompute(prompt, rid="probe-recomputed", tokens=16)
        server.ask(prompt)
        server.settle()
        server.assert_nothing_left()
        server.process.stop()
    with serve(tmp_path, model, "hybrid", costs) as server:
        restored = server.ask(prompt, rid="probe-restored", tokens=16)
        assert (restored.host, restored.disk) == (0, 640)
        assert server.counter("restore.layers_recomputed") == recomputed_layers(profile, PlanKind.HYBRID, 640)
        assert largest_difference(restored, recomputed) <= TOLERANCE
        assert_same_pool(server, "restored", "recomputed")
        server.assert_nothing_left()


def test_the_baseline_without_a_tier(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """``recompute`` neither stores nor restores, and leaves nothing on disk."""
    model, costs = tiny_model(layers=LAYERS), tmp_path / "costs.json"
    write_profile(model, costs, fixed=1, hidden=1, kv=1, project=1, run=9)
    with serve(tmp_path, model, "recompute", costs) as server:
        prompt = random_prompt(1, 700)
        first = server.ask(prompt)
        server.to_tiers()
        again = server.ask(prompt)
        assert again.cached == 0
        assert largest_difference(first, again) <= TOLERANCE
        assert "nothing is stored or restored" in server.process.log_text()
        server.assert_nothing_left()
    assert not (tmp_path / "disk").exists()
