"""Which restores are started, and how: by the profile, and by what restores and prefills turn out to take."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.gate import IDLE, LOADED, Load, RestoreGate
from sglang_hcache.sglang_plugin.setup.start_lines import prediction_text
from tests.made_profiles import made_profile, per_token, reads

LAYERS = 10
SHAPE = ModelShape(
    name="x", num_layers=LAYERS, hidden_size=8, num_heads=2, num_kv_heads=2, head_size=4, ffn=FFNKind.GATED, ffn_size=8
)  # fmt: skip


def gate(
    *,
    host: float = 1e-6,
    disk: float | None = 4e-6,
    project: float = 1e-6,
    run: CostCurve | None = None,
    methods: tuple[Method, ...] = (Method.HIDDEN,) * LAYERS,
    may_recompute: bool = False,
    block_tokens: int = 4096,
    contention: float = 0.0,
    pass_tokens: float = math.inf,
) -> RestoreGate:
    """One layer's costs as given, seconds a token; recomputing takes 0.5 ms and 2 us a token."""
    tiers = {"host": reads(host, 2 * host)}
    if disk is not None:
        tiers["disk"] = reads(disk, 2 * disk, contention=contention)
    profile = made_profile(SHAPE, tiers, project=project, run=run or per_token(2e-6, 5e-4))
    return RestoreGate(profile, methods, block_tokens, may_recompute=may_recompute, pass_tokens=pass_tokens)


def decide(gate: RestoreGate, host: int, disk: int, start: int = 0, *, loaded: bool = False) -> Decision:
    return gate.decide({"host": host, "disk": disk}, start, LOADED if loaded else IDLE)


def test_the_slower_resource_decides_and_the_pipeline_has_to_fill() -> None:
    assert decide(gate(), 1024, 0).restore_s == pytest.approx(0.002 + 1024 * (LAYERS + 1) * 1e-6)
    from_disk = decide(gate(), 0, 1024)
    assert from_disk.restore_s == pytest.approx(0.002 + 1024 * (LAYERS * 4e-6 + 1e-6))
    assert from_disk.recompute_s == pytest.approx(1024 * 20e-6), "a pass there is in any case"
    assert from_disk.layers == tuple(range(LAYERS))


def test_where_reads_and_products_share_cores_both_count() -> None:
    found = decide(gate(contention=1.0), 0, 1024)
    assert found.restore_s == pytest.approx(0.002 + 1024 * (LAYERS * 4e-6 + 1e-6) * 5 / 4)


def test_blocks_shorten_the_fill() -> None:
    in_one, in_four = (decide(gate(block_tokens=size), 4096, 0).restore_s for size in (4096, 1024))
    assert in_one - in_four == pytest.approx(3 / 4 * 4096 * 1e-6)


def test_a_restore_that_would_be_slower_is_not_started() -> None:
    assert decide(gate(), 1024, 0).pays()
    assert not decide(gate(), 0, 1024).pays()
    assert not decide(gate(), 1024, 0).pays(0.020), "it would wait for others too long"


@pytest.mark.parametrize("fixed_s", [0.0, 5e-4, 1.0])
def test_a_minimum_length_falls_out_of_the_costs(fixed_s: float) -> None:
    """Of our own fixed costs: those of a pass are not saved, for the request's last token needs one."""
    some = gate(run=per_token(2e-6, fixed_s))
    lengths = [64 * count for count in range(1, 200)]
    pays = [decide(some, length, 0).pays() for length in lengths]
    assert pays == sorted(pays), "from some length on it pays"
    assert (pays[0], pays[2], pays[-1]) == (False, False, True)
    assert some.prefill_s(100, 50) == pytest.approx(100 * LAYERS * 2e-6)


def test_each_pass_that_a_prompt_fills_costs_what_a_pass_costs() -> None:
    """On a GPU with short passes that is all: to launch the kernels of each takes longer than its tokens."""
    run = per_token(0.0, 6e-3)
    short = gate(run=run, disk=1e-5, may_recompute=True, pass_tokens=512)
    assert [short.prefill_s(count, 0) for count in (448, 512, 1000, 4096)] == [
        pytest.approx(passes * LAYERS * 6e-3) for passes in (0, 1, 1, 8)
    ]
    from_disk = decide(short, 0, 4096)
    assert from_disk.pays()
    assert from_disk.first_layers_s == pytest.approx(from_disk.num_recompute * 8 * 6e-3)
    assert decide(gate(run=run, disk=1e-5, may_recompute=True), 0, 4096).num_recompute == 9
    assert from_disk.num_recompute == 4, "eight passes through each of these layers"


def test_a_tier_that_was_not_measured_is_judged_by_its_first_restore() -> None:
    unknown = gate(disk=None)
    first = decide(unknown, 0, 1024)
    assert first.restore_s == decide(unknown, 1024, 0).restore_s
    assert first.pays()
    assert first.deadline_s(0.0) == 0.25, "and given up early"
    unknown.restored(first, 0.1)
    assert decide(unknown, 0, 1024).restore_s == pytest.approx(0.1, rel=0.1)
    assert not decide(unknown, 0, 1024).pays()
    assert decide(unknown, 1024, 0).pays(), "of host memory it says nothing"
    slow = decide(unknown, 0, 1024)
    unknown.restored(slow, 100.0)
    assert decide(unknown, 0, 1024).restore_s < 1.2 * slow.restore_s, "the second one is one of many"


def test_what_comes_from_two_tiers_is_learnt_of_the_unknown_one() -> None:
    unknown = gate(disk=None, project=3e-6)
    mixed = decide(unknown, 512, 512)
    assert mixed.bottleneck == "disk"
    unknown.restored(mixed, 0.1)
    assert decide(unknown, 0, 1024).restore_s == pytest.approx(0.1, rel=0.1)
    assert decide(unknown, 1024, 0).restore_s == decide(gate(project=3e-6), 1024, 0).restore_s


def test_how_many_layers_are_recomputed_follows_tier_length_and_load() -> None:
    growing = CostCurve(per_token_s=4e-6, per_token_squared_s=2e-9)
    some = gate(may_recompute=True, run=growing, disk=8e-6)
    assert decide(some, 1024, 0).num_recompute == 0, "computing is the bottleneck already"
    from_disk = decide(some, 0, 1024)
    assert 0 < from_disk.num_recompute < LAYERS
    assert from_disk.restore_s < decide(gate(run=growing, disk=8e-6), 0, 1024).restore_s
    assert from_disk.layers == tuple(range(from_disk.num_recompute, LAYERS))
    assert decide(some, 0, 16384).num_recompute < from_disk.num_recompute, "recomputing grows with the square"
    assert decide(some, 0, 1024, loaded=True).num_recompute < from_disk.num_recompute
    assert decide(some, 0, 1024, start=8192).num_recompute < from_disk.num_recompute, "more to look at"


def test_projections_alone_are_slowed_where_they_leave_the_device_to_others() -> None:
    def work_s(method: Method, load: Load) -> float:
        some = gate(methods=(method,) * LAYERS, project=3e-6)
        return some.decide({"host": 1024}, 0, load).work_s

    slow = Load(1.0, 5.0)
    assert work_s(Method.HIDDEN, slow) == pytest.approx(1024 * (LAYERS * 15e-6 + 1e-6))
    assert work_s(Method.KV, slow) == work_s(Method.KV, IDLE)


def test_what_it_takes_to_launch_a_projection_is_not_slowed_with_it() -> None:
    """It is the CPU's work, and decides what a few tokens take."""
    some = gate(methods=(Method.HIDDEN,) * LAYERS)
    hidden = CostCurve(fixed_s=2.5e-4, per_token_s=1e-7)
    compute = replace(some.profile.compute, hidden=hidden)
    some.profile = replace(some.profile, compute=compute)
    slowed, idle = (some.decide({"host": 64}, 0, load).work_s for load in (Load(1.0, 5.0), IDLE))
    assert slowed - idle == pytest.approx(LAYERS * 64 * 4 * 1e-7, rel=0.01)


def test_a_layer_is_not_recomputed_for_a_few_per_cent() -> None:
    """All layers are read in 80 us a token, all but the first one in 72."""

    def recomputed(first_layer: float) -> int:
        some = gate(may_recompute=True, methods=(Method.KV,) * LAYERS, run=per_token(first_layer))
        return decide(some, 0, 1024).num_recompute

    assert recomputed(72e-6) == 1
    assert recomputed(74e-6) == 0


def test_stored_kv_is_read_behind_the_hidden_states_it_waits_for() -> None:
    mixed = (Method.KV,) * 2 + (Method.HIDDEN,) * 8
    decision = decide(gate(methods=mixed, project=2e-6), 1024, 0)
    assert sorted(decision.layers) == list(range(LAYERS))
    assert decision.layers[0] == 2


def test_drift_is_followed_and_one_outlier_is_not() -> None:
    outlier = gate(host=2e-6)
    before = decide(outlier, 1024, 0).restore_s
    outlier.restored(decide(outlier, 1024, 0), 100.0)
    assert decide(outlier, 1024, 0).restore_s < 1.2 * before
    drift = gate(host=2e-6)
    for _ in range(30):
        drift.restored(decide(drift, 1024, 0), 3 * before)
    assert decide(drift, 1024, 0).restore_s == pytest.approx(3 * before, rel=0.15)
    assert decide(drift, 0, 1024).work_s == decide(gate(host=2e-6), 0, 1024).work_s, (
        "the other tier is another matter"
    )


def fast() -> RestoreGate:
    """64 tokens take 0.25 ms and 16,384 take 61 ms, and 2 ms besides."""
    return gate(host=3.7e-7, project=1e-7)


@pytest.mark.parametrize("seconds", [0.001, 0.012])
def test_what_short_restores_take_besides_says_little_of_long_ones(seconds: float) -> None:
    some = fast()
    before = decide(some, 16384, 0).restore_s
    for _ in range(40):
        some.restored(decide(some, 64, 0), seconds)
    assert decide(some, 64, 0).restore_s == pytest.approx(0.002 + seconds, rel=0.1)
    assert before < decide(some, 16384, 0).restore_s < 1.5 * before
    for _ in range(20):
        some.restored(decide(some, 64, 0), seconds)
        some.restored(decide(some, 16384, 0), 0.061)
    assert decide(some, 64, 0).restore_s == pytest.approx(0.002 + seconds, rel=0.1)
    assert decide(some, 16384, 0).restore_s == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_surprise_counts_once_for_all_that_were_in_flight(factor: float) -> None:
    some = fast()
    before = decide(some, 16384, 0).job_s
    for decision in [decide(some, 16384, 0) for _ in range(24)]:
        some.restored(decision, factor * before)
    assert decide(some, 16384, 0).job_s == pytest.approx(factor * before, rel=0.2)


def test_so_it_does_of_recomputing() -> None:
    some = gate(may_recompute=True, methods=(Method.KV,) * LAYERS, run=per_token(6e-6))
    decisions = [decide(some, 0, 1024) for _ in range(24)]
    for decision in decisions:
        some.restored(decision, decision.job_s, 2 * decision.first_layers_s)
    after = decide(some, 0, 1024)
    assert after.drift["recompute"] == pytest.approx(2, rel=0.1)
    assert after.num_recompute < decisions[0].num_recompute
    assert after.recompute_s == decisions[0].recompute_s


def test_a_slower_device_is_not_taken_for_a_slower_tier() -> None:
    slow = gate(project=3e-6)
    for _ in range(30):
        slow.restored(decide(slow, 1024, 0), 0.1)
    assert decide(slow, 0, 1024).bottleneck == "project", "that tier has not changed, but the device has"
    assert decide(slow, 1024, 0).restore_s == pytest.approx(0.1, rel=0.15)


def test_what_prefills_take_is_learnt() -> None:
    faster = gate()
    assert decide(faster, 1024, 0).pays()
    for _ in range(30):
        faster.prefilled(1024, 0, 0.0105)
    assert decide(faster, 1024, 0).recompute_s == pytest.approx(0.0105 - 0.0021, rel=0.15), (
        "the pass is no gain"
    )
    assert not decide(faster, 1024, 0).pays()


def test_nothing_is_learnt_from_prefills_shorter_than_what_was_measured() -> None:
    """On a GPU they take as long as launching their kernels."""
    unmoved = gate()
    before = decide(unmoved, 1024, 0).recompute_s
    unmoved.profile = replace(unmoved.profile, token_range=(1024, 4096))
    for _ in range(30):
        unmoved.prefilled(1023, 0, 10.0)
    assert decide(unmoved, 1024, 0).recompute_s == before
    unmoved.prefilled(1024, 0, 10.0)
    assert decide(unmoved, 1024, 0).recompute_s > before


class Served:
    """What 1,024 tokens from the disk took each of a number of requests, in ``seconds`` or by recomputing."""

    def __init__(self, gate: RestoreGate, seconds: float, requests: int) -> None:
        self.tried: list[int] = []
        """Which were tried, or were to pay."""
        for request in range(requests):
            decision = decide(gate, 0, 1024)
            if not decision.pays():
                if not gate.is_due(decision):
                    continue
                decision = gate.decide({"disk": 1024}, 0, is_try=True)
            gate.begins(decision)
            self.tried.append(request)
            deadline_s = decision.deadline_s(0.0)
            gate.restored(decision, min(seconds, deadline_s), is_complete=seconds < deadline_s)


def slow_to_compute() -> RestoreGate:
    """1,024 tokens take 2 s, and 41 ms from the disk."""
    return gate(run=per_token(2e-4))


@pytest.mark.parametrize("seconds", [2.2, 10.0], ids=["slower", "stopped"])
def test_a_tier_that_became_slow_costs_few_requests_time(seconds: float) -> None:
    """Two until that is believed, then fewer and fewer of those that are tried."""
    served = Served(slow_to_compute(), seconds, 1000)
    assert served.tried[:2] == [0, 1]
    assert [later - earlier for earlier, later in zip(served.tried[1:], served.tried[2:], strict=False)] == [
        32,
        64,
        128,
        256,
        512,
    ]


def test_a_disk_that_became_slow_is_not_taken_for_slow_work() -> None:
    """Projecting is predicted to decide. Restores from host memory go on as before, and teach nothing of the disk."""
    some = gate(project=4e-5, run=per_token(2e-4))
    late = 0
    for _ in range(100):
        in_memory = decide(some, 1024, 0)
        assert in_memory.bottleneck == "project"
        assert in_memory.pays()
        some.restored(in_memory, in_memory.job_s)
        on_disk = decide(some, 0, 1024)
        if on_disk.pays():
            late += 1
            deadline_s = on_disk.deadline_s(0.0)
            some.restored(on_disk, deadline_s, waited_s=0.9 * deadline_s, is_complete=False)
    assert late == 2


def test_so_does_one_from_which_restores_were_short() -> None:
    """What they take beside their predicted 1 ms is waiting for reads, and no delay of all restores."""
    some = gate(disk=1e-7, project=1e-8, run=per_token(3e-6))
    assert decide(some, 0, 1024).work_s < 0.002
    late = 0
    for _ in range(100):
        decision = decide(some, 0, 1024)
        if decision.pays():
            late += 1
            deadline_s = decision.deadline_s(0.0)
            some.restored(decision, deadline_s, waited_s=0.9 * deadline_s, is_complete=False)
    assert late <= 3
    assert decide(some, 1024, 0).pays()


@pytest.mark.parametrize("disk", [4e-6, 1e-6, None])
def test_a_slow_disk_is_not_blamed_on_host_memory_that_has_most_of_a_prefix(disk: float | None) -> None:
    """Nor where it was taken to be as fast."""
    some = gate(run=per_token(2e-4), disk=disk)
    if disk is None:
        some.restored(decide(some, 0, 1024), decide(some, 0, 1024).job_s)
    mixed = decide(some, 4096, 64)
    assert (mixed.bottleneck, mixed.tier) == ("host", "disk")
    for _ in range(3):
        deadline_s = decide(some, 4096, 64).deadline_s(0.0)
        some.restored(decide(some, 4096, 64), deadline_s, waited_s=0.9 * deadline_s, is_complete=False)
    assert decide(some, 4096, 0).pays()
    assert decide(some, 4096, 0).drift["host"] == 1.0
    assert not decide(some, 0, 64).pays()


def test_waiting_for_reads_as_predicted_is_no_slow_disk() -> None:
    some = gate(project=4e-5, run=per_token(2e-4))
    before = decide(some, 0, 1024)
    some.restored(before, 2 * before.job_s, waited_s=before.io_s)
    after = decide(some, 0, 1024)
    assert after.drift["disk"] == 1.0
    assert after.drift["project"] > 1.1


def test_nor_is_waiting_for_less_than_half_of_it() -> None:
    some = gate(disk=1e-6, project=2e-6, run=per_token(1e-5))
    before = decide(some, 0, 1024)
    some.restored(before, 10 * before.job_s, waited_s=2 * before.io_s)
    after = decide(some, 0, 1024)
    assert after.drift["disk"] == 1.0
    assert after.drift["project"] > 1.1


def test_a_tier_that_recovered_is_used_again() -> None:
    some = slow_to_compute()
    Served(some, 10.0, 10_000)
    assert not decide(some, 0, 1024).pays()
    assert len(Served(some, 0.041, 1000).tried) > 1000 - 512 - 2
    assert decide(some, 0, 1024).restore_s == pytest.approx(0.043, rel=0.1)


def test_a_tier_that_was_measured_as_too_slow_is_found_to_be_fast() -> None:
    pessimistic = gate(disk=4e-5, run=per_token(1e-5))
    assert not decide(pessimistic, 0, 1024).pays()
    assert len(Served(pessimistic, 0.041, 100).tried) > 60


def test_short_restores_are_not_tried_while_longer_ones_are_started() -> None:
    some = fast()
    for _ in range(100):
        some.restored(decide(some, 16384, 0), 0.061)
        short = [some.is_due(decide(some, 64, 0)) for _ in range(20)]
        assert not decide(some, 64, 0).pays()
        assert not any(short)


def test_one_that_is_only_tried_is_planned_as_if_all_were_as_fast_as_measured() -> None:
    """It is lost if the tier is still slow, or if layers have to be recomputed, too: then the next one does that."""
    some = mixing(disk=16e-6)
    before = decide(some, 0, 1024)
    assert 0 < before.num_recompute < LAYERS
    for _ in range(20):
        late = decide(some, 0, 1024)
        some.restored(late, 10.0, late.first_layers_s or None, waited_s=9.0, is_complete=False)
    slow = decide(some, 0, 1024)
    assert not slow.pays()
    plain = some.decide({"disk": 1024}, 0, is_try=True)
    assert (plain.num_recompute, plain.recompute_s, plain.drift["disk"]) == (0, slow.recompute_s, 1.0)
    some.restored(plain, plain.recompute_s, is_complete=False)
    assert decide(some, 0, 1024).drift == slow.drift, "it was no slower than is known"
    mixed = some.decide({"disk": 1024}, 0, is_try=True)
    assert mixed.num_recompute == before.num_recompute
    some.restored(mixed, mixed.job_s, mixed.first_layers_s, others_s=mixed.others_s)
    assert some.decide({"disk": 1024}, 0, is_try=True).num_recompute, "that one was won"
    some.restored(mixed, mixed.job_s, mixed.first_layers_s, others_s=mixed.others_s)
    assert decide(some, 0, 1024).pays()


def test_one_that_is_only_tried_counts_what_became_faster() -> None:
    some = gate(host=2e-6)
    some.restored(decide(some, 1024, 0), decide(some, 1024, 0).job_s / 2)
    tried = some.decide({"host": 1024}, 0, is_try=True)
    assert tried.drift["host"] == decide(some, 1024, 0).drift["host"] < 1


def test_what_one_recomputes_that_is_only_tried_takes_no_longer_than_recomputing_all() -> None:
    """As far as is known: a pass through first layers cannot be stopped."""
    some = mixing(disk=16e-6)
    for _ in range(20):
        found = decide(some, 0, 1024)
        first_layers_s = found.num_recompute * 6 * 1024 * 16e-6
        some.restored(found, 10.0, first_layers_s or None, is_complete=False)
    factor = decide(some, 0, 1024).drift["recompute"]
    assert factor > 4
    lost = some.decide({"disk": 1024}, 0, is_try=True)
    some.restored(lost, lost.recompute_s, is_complete=False)
    tried = some.decide({"disk": 1024}, 0, is_try=True)
    assert tried.num_recompute == 1
    assert factor * tried.first_layers_s < tried.recompute_s


def test_one_that_is_only_tried_is_stopped_when_recomputing_would_be_over() -> None:
    decision = gate(disk=1e-2, run=per_token(2e-4)).decide({"disk": 1024}, 0, is_try=True)
    assert not decision.pays()
    assert decision.deadline_s(0.0) == decision.recompute_s
    short = gate(disk=1e-2).decide({"disk": 64}, 0, is_try=True)
    assert short.deadline_s(0.5) == 0.5 + 0.05


def test_one_is_tried_at_a_time() -> None:
    some = gate(disk=1e-2)
    due = [some.is_due(decide(some, 0, 1024)) for _ in range(40)]
    assert due == [False] * 31 + [True] * 9, "until one could start"
    some.begins(some.decide({"disk": 1024}, 0, is_try=True))
    assert not any(some.is_due(decide(some, 0, 1024)) for _ in range(31)), "its end is not known"


def test_of_what_lies_in_two_tiers_the_disk_is_tried() -> None:
    """Also where host memory has most of it: a disk as fast as when it was measured would be read sooner than that."""
    some = gate(run=per_token(2e-6))
    some._drift.factors["disk"] = 100.0
    slow = decide(some, 4096, 512)
    assert slow.bottleneck == "disk"
    assert [some.is_due(slow) for _ in range(32)] == [False] * 31 + [True]
    tried = some.decide({"host": 4096, "disk": 512}, 0, is_try=True)
    assert tried.bottleneck == "host"
    some.begins(tried)
    assert not some.is_due(slow)
    some.restored(tried, tried.recompute_s, is_complete=False)
    assert not any(some.is_due(slow) for _ in range(63))
    assert some.is_due(slow)


def test_one_that_is_only_tried_is_stopped_when_what_is_done_without_it_would_be_over() -> None:
    some = gate(run=per_token(2e-4))
    tried = some.decide({"host": 1024, "disk": 1024}, 0, is_try=True, without_s=1.0)
    assert tried.recompute_s == tried.deadline_s(0.0) == 1.0
    some.restored(tried, 1.1)
    assert not some.is_due(replace(decide(some, 1024, 1024), recompute_s=0.01)), "it was lost"


def test_a_deadline_leaves_time_for_those_before() -> None:
    decision = decide(gate(), 102_400, 0)
    assert decision.deadline_s(0.5) == pytest.approx(0.5 + 1.5 * decision.recompute_s)
    assert decide(gate(), 64, 0).deadline_s(0.0) == 0.25


def test_layers_that_take_longer_to_recompute_are_fewer() -> None:
    """Blamed on projecting, more would be recomputed, and then more again."""
    some = gate(may_recompute=True, methods=(Method.KV,) * LAYERS, run=per_token(8e-6))
    layer_s, read_s = 1.6 * 1024 * 8e-6, 1024 * 8e-6

    def takes(recomputed: int) -> float:
        return 0.002 + max(recomputed * layer_s, (LAYERS - recomputed) * read_s)

    assert takes(decide(some, 0, 1024).num_recompute) > 1.15 * min(map(takes, range(LAYERS)))
    for _ in range(60):
        found = decide(some, 0, 1024)
        some.restored(found, takes(found.num_recompute), found.num_recompute * layer_s)
    assert takes(found.num_recompute) <= 1.15 * min(map(takes, range(LAYERS)))
    assert found.drift["recompute"] == pytest.approx(1.6, rel=0.05)
    assert found.recompute_s == pytest.approx(LAYERS * layer_s / 1.6), "whole prefills run beside no reads"


def test_so_are_they_where_recomputing_did_not_end_in_time() -> None:
    some = gate(may_recompute=True, methods=(Method.KV,) * LAYERS, run=per_token(6e-6, 5e-4))
    before = decide(some, 0, 1024)
    assert before.bottleneck == "recompute"
    some.restored(before, 2 * before.restore_s, is_complete=False)
    after = decide(some, 0, 1024)
    assert after.drift["recompute"] > 1.1
    assert after.recompute_s == before.recompute_s


def mixing(disk: float) -> RestoreGate:
    """K and V from a disk; a layer's tokens take 16 us each to recompute, and twice ``disk`` to read."""
    return gate(may_recompute=True, methods=(Method.KV,) * LAYERS, host=1e-7, disk=disk, run=per_token(16e-6))


def restore_of_both(some: RestoreGate, read_s: float, run_s: float) -> int:
    """One of 1,024 tokens from disk: a layer takes so long to read, or to recompute. Returns how many were
    recomputed.
    """
    decision = decide(some, 0, 1024)
    first_s, others_s = decision.num_recompute * run_s, (LAYERS - decision.num_recompute) * read_s
    waited_s = max(0.0, others_s - first_s)
    some.restored(decision, max(first_s, others_s), first_s or None, others_s=others_s, waited_s=waited_s)
    return decision.num_recompute


def test_what_was_recomputed_for_a_slow_disk_is_read_again_when_that_is_fast() -> None:
    """Recomputing decides then how long it all takes, but not how long the reads do."""
    some, run_s = mixing(2e-6), 1024 * 16e-6
    before = restore_of_both(some, 1024 * 4e-6, run_s)
    for _ in range(5):
        during = restore_of_both(some, 5 * 1024 * 4e-6, run_s)
    assert during > before + 2
    for _ in range(10):
        after = restore_of_both(some, 1024 * 4e-6, run_s)
    assert after <= before + 1


def test_slow_first_layers_are_not_blamed_on_the_disk() -> None:
    """Nor if the others had to wait for the device as long."""
    some, run_s = mixing(4e-6), 1024 * 16e-6
    for _ in range(4):
        restore_of_both(some, 1024 * 8e-6, 6 * run_s)
    found = decide(some, 0, 1024)
    assert found.drift["disk"] < 1.2
    assert found.drift["recompute"] > 4
    some = mixing(4e-6)
    first = decide(some, 0, 1024)
    some.restored(
        first, 6 * first.first_layers_s, 6 * first.first_layers_s, others_s=6 * first.first_layers_s
    )
    assert decide(some, 0, 1024).drift["disk"] == 1.0


def test_first_layers_that_were_stopped_took_too_long_where_the_others_are_there() -> None:
    some = mixing(8e-6)
    first = decide(some, 0, 1024)
    assert first.num_recompute
    some.restored(first, 3 * first.job_s, others_s=first.others_s, is_complete=False)
    assert decide(some, 0, 1024).drift == {**first.drift, "recompute": pytest.approx(2**0.2)}


def test_first_layers_that_were_stopped_early_say_nothing_and_the_others_do() -> None:
    some = mixing(8e-6)
    first = decide(some, 0, 1024)
    some.restored(first, first.job_s / 2, others_s=first.others_s / 4, is_complete=False)
    found = decide(some, 0, 1024).drift
    assert found["recompute"] == 1.0
    assert found["disk"] < 1


def test_a_try_that_is_lost_for_its_first_layers_shows_that_they_are_fast_again() -> None:
    """Neither reading all nor recomputing as much as may be tried pays while these count as slow."""
    some, layer_s = mixing(10.4e-6), 1024 * 16e-6
    healthy = decide(some, 0, 1024)
    assert healthy.num_recompute

    def serve(slower: float) -> bool:
        decision = decide(some, 0, 1024)
        if not decision.pays():
            if not some.is_due(decision):
                return False
            decision = some.decide({"disk": 1024}, 0, is_try=True)
        some.begins(decision)
        count, limit_s = decision.num_recompute, decision.deadline_s(0.0)
        first_s, others_s = count * slower * layer_s, (LAYERS - count) * 1.3 * layer_s
        some.restored(
            decision,
            min(limit_s, max(first_s, others_s)),
            first_s if 0 < first_s < limit_s else None,
            others_s=others_s if others_s < limit_s else None,
            waited_s=0.0,
            is_complete=max(first_s, others_s) < limit_s,
        )
        return True

    for _ in range(20):
        serve(8.0)
    assert not decide(some, 0, 1024).pays()
    assert sum(serve(1.0) for _ in range(2000)) > 1000


def test_that_first_layers_were_slow_once_is_forgotten() -> None:
    """Where none is recomputed nothing else would show it."""
    some, run_s = mixing(4e-6), 1024 * 16e-6
    before = restore_of_both(some, 1024 * 8e-6, run_s)
    for _ in range(6):
        restore_of_both(some, 1024 * 8e-6, 8 * run_s)
    assert restore_of_both(some, 1024 * 8e-6, run_s) == 0
    for _ in range(300):
        after = restore_of_both(some, 1024 * 8e-6, run_s)
    assert after == before > 0


def test_restores_that_would_recompute_none_say_nothing_of_first_layers() -> None:
    some = mixing(8e-6)
    for _ in range(6):
        restore_of_both(some, 1024 * 16e-6, 3 * 1024 * 16e-6)
    slow = decide(some, 0, 1024).drift["recompute"]
    assert slow > 2
    for _ in range(300):
        in_memory = decide(some, 1024, 0)
        assert (in_memory.num_recompute, in_memory.avoids_first_layers) == (0, False)
        some.restored(in_memory, in_memory.job_s)
    assert decide(some, 0, 1024).drift["recompute"] == slow


def test_what_long_restores_take_more_or_less_is_no_delay_of_short_ones() -> None:
    some, random_state = gate(disk=1.3e-6, run=per_token(1e-5)), random.Random(1)
    assert decide(some, 0, 128).pays()
    for _ in range(1500):
        seconds = 1.45 * math.exp(random_state.gauss(0, 0.2))
        some.restored(decide(some, 0, 2**17), seconds, waited_s=0.9 * seconds)
    assert decide(some, 0, 128).pays()
    assert decide(some, 0, 128).delay_s < 0.001


def test_what_would_pay_is_never_only_tried() -> None:
    """It is not started for the sake of others, and will be without a try."""
    some = gate()
    assert not any(some.is_due(decide(some, 1024, 0)) for _ in range(100))
    assert any(some.is_due(decide(some, 0, 1024)) for _ in range(100))


def test_a_restore_that_was_stopped_early_says_nothing_of_how_long_it_would_have_taken() -> None:
    some = gate()
    before = decide(some, 1024, 0)
    some.restored(before, before.job_s / 2, is_complete=False)
    assert decide(some, 1024, 0).job_s == before.job_s
    some.restored(before, 2 * before.job_s, is_complete=False)
    assert decide(some, 1024, 0).job_s > before.job_s


def test_pays_from_the_first_length_that_is_restored() -> None:
    """2 ms of overhead against 20 us a token from host memory; the disk is slower than recomputing."""
    found = gate(disk=40e-6)
    first = found.pays_from("host", 8192)
    assert first is not None
    assert [decide(found, count, 0).pays() for count in (first - 64, first, 8192)] == [False, True, True]
    assert found.pays_from("host", first - 64) is None
    assert found.pays_from("disk", 8192) is None


def test_what_a_start_says() -> None:
    found = gate(disk=40e-6)
    text = prediction_text(found, 8192)
    assert text.startswith("predicted for 4,096 tokens from disk: restore ")
    assert text.endswith(f"; restores pay from {found.pays_from('host', 8192)} tokens (host), never (disk)")
