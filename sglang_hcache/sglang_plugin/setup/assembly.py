"""From a configuration and a loaded model to a tier that serves: check, measure, plan, build."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sglang_hcache.core.config import DiskAtStart, HCacheConfig, RestoreWhen
from sglang_hcache.core.errors import ConfigError, StoreError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.core.units import format_bytes, format_duration
from sglang_hcache.device.row_writers import load_row_writer
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.stored import PLANNED_TOKENS, planned_tier
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.lanes import Lanes
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.sglang_plugin.seam.budget import HostBudget, longest_run, store_config
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.seam.ranks import Ranks
from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.sglang_plugin.serving.metrics import MetricsObserver
from sglang_hcache.sglang_plugin.setup import selfcheck
from sglang_hcache.sglang_plugin.setup.measuring import Bench
from sglang_hcache.sglang_plugin.setup.planning import choose_stored, describe, find_profile, noted_mix
from sglang_hcache.store import DiskStore, StoreStats
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import PIECE_CHUNKS, TieredStore

logger = logging.getLogger(__name__)

_TRIED = {
    PlanKind.AUTO: (Method.HIDDEN, Method.KV),
    PlanKind.HIDDEN: (Method.HIDDEN,),
    PlanKind.KV: (Method.KV,),
    PlanKind.HYBRID: (Method.KV,),
    PlanKind.RECOMPUTE: (),
}
"""What may be restored, and so is checked before serving."""
_MIXED = (PlanKind.AUTO, PlanKind.HYBRID)
"""What may recompute first layers, and needs costs for that whatever is restored."""
_GROUP_SLOTS, _FEWEST_GROUPS = 4, 64
"""Beside a GPU each stretch of neighbouring chunks is a copy: of 1 MB nearly twice as fast as of 256 KB (H200). In a
simulation of conversations chunks lie alone before long without groups; with groups of four 1 to 3 % fewer are found
again, of eight up to 15 %, for slots behind a prefix wait for it to go on."""


def assemble(
    config: HCacheConfig, model: ServedModel, device: Device, machine: Callable[[Sequence[Path]], str]
) -> Bridge:
    """Build a tier; while nobody is served yet.

    Args:
        machine: its name in a profile, with these directories.

    Raises:
        ConfigError: the configuration does not fit the model or the machine.
        SelfCheckError: what is restored is not what the model wrote.
        StoreError: the disk tier cannot be opened, and the server shall not start without.
    """
    labels = device.scheduler.metric_labels()
    counters = Counters(MetricsObserver(labels) if labels is not None else None)
    restorer, asked = restorer_of(model, device), config
    config = _without_hidden_states(config, model)
    check = _check(config, model, restorer, device)
    if check is not None:
        restorer = check.restorer
        if restorer.projector is None:
            config = config.without_hidden_states()
    with ExitStack() as undo:
        disk, left_out = _open_disk(config, model.shape.hidden_size, counters, model.ranks)
        if disk is not None:
            undo.callback(disk.close)
        if left_out is not None:
            config = config.model_copy(update={"dirs": ()})
        profile = _profile(config, model, device, restorer, disk, machine(config.dirs))
        weights = model.weights()
        stored = choose_stored(config, profile, model.shape, disk, weights)
        layout = model.layout(stored)
        budget = _budget(config, layout, device, model.context_length)
        open_late = None
        if left_out is not None:
            open_late = partial(_open_late, asked, model.shape.hidden_size, counters, stored, weights)
        tiers = _tiers(config, layout, budget, disk, left_out, open_late, counters, device)
        gate = None
        if profile is not None and _predicts(config) and model.ranks.rank == 0:
            may_recompute = config.method in _MIXED and check is not None and check.may_recompute
            block_tokens = CHUNK_TOKENS * budget.block_chunks
            pass_tokens = device.largest_pass if device.cuts_prompts else math.inf
            gate = RestoreGate(
                profile, stored, block_tokens, may_recompute=may_recompute, pass_tokens=pass_tokens
            )
        namespace = model.namespace(layout, weights)
        bridge = Bridge(config, model, namespace, tiers, budget, device, restorer, gate, counters, labels)
        undo.pop_all()
    _log_model(asked, model, stored, check)
    if config.method is not PlanKind.RECOMPUTE:
        _log_tiers(config, tiers, budget)
    logger.info("hcache: namespace %s (weights %s)", namespace.namespace_id().hex(), weights.hex()[:8])
    if gate is not None:
        logger.info("hcache: %s", prediction_text(gate, model.context_length))
    return bridge


def _open_disk(
    config: HCacheConfig, hidden_size: int, counters: Counters, ranks: Ranks
) -> tuple[DiskStore | None, StoreStats | None]:
    """The disk tier, or what to tell of the one that this server does without."""
    settings = store_config(config, hidden_size)
    if settings is None or config.method is PlanKind.RECOMPUTE:
        return None, None
    disk, why_not = None, None
    try:
        disk = DiskStore.open(settings, counters)
    except StoreError as error:
        is_to_be_measured = config.save_profile is not None
        if config.disk_at_start is DiskAtStart.REQUIRED or is_to_be_measured:
            raise
        why_not = str(error)
    (all_are_open,) = ranks.least(disk is not None)
    if all_are_open:
        return disk, None
    if disk is not None:
        disk.close()
    why_not = why_not or "that of another rank cannot be opened"
    logger.warning(
        "hcache: the disk tier cannot be opened; this server runs without it, and tries again every minute "
        "(--hcache-disk-at-start optional): %s", why_not,
    )  # fmt: skip
    return None, StoreStats.not_opened(settings, why_not)


def _open_late(
    config: HCacheConfig, hidden_size: int, counters: Counters, stored: Sequence[Method], weights: bytes
) -> DiskStore:
    """The disk tier, later than at start. Raises StoreError."""
    settings = store_config(config, hidden_size)
    assert settings is not None
    disk = DiskStore.open(settings, counters)
    noted = noted_mix(disk, weights, len(stored))
    if config.method is PlanKind.AUTO and noted not in (None, tuple(stored)):
        logger.warning(
            "hcache: what is on disk is stored by another mix (%s), chosen when the disk was there: it serves again at "
            "the next start", describe(noted or ()),
        )  # fmt: skip
    return disk


def restorer_of(model: ServedModel, device: Device) -> LayerRestorer:
    """What writes K and V of ``model`` into the pool of ``device``; without a projector."""
    rows, lanes = load_row_writer(is_cpu=device.is_cpu), Lanes() if device.is_cpu else None
    stage = None if device.beside is None else device.beside.stage
    return LayerRestorer(model.row_dtype, device.pool, model.shape.num_kv_heads, None, rows, lanes, stage)


def _without_hidden_states(config: HCacheConfig, model: ServedModel) -> HCacheConfig:
    """``config``, if need be without what ``model`` does not allow."""
    if model.why_not_hidden is None:
        return config
    if config.method is PlanKind.HIDDEN:
        raise ConfigError(f"--hcache-method hidden cannot be used: {model.why_not_hidden}; use auto or kv")
    logger.info("hcache: hidden states are not used: %s", model.why_not_hidden)
    return config.without_hidden_states()


def _predicts(config: HCacheConfig) -> bool:
    if config.method is PlanKind.RECOMPUTE:
        return False
    return config.method in _MIXED or config.restore is RestoreWhen.FASTER


def _check(
    config: HCacheConfig, model: ServedModel, restorer: LayerRestorer, device: Device
) -> selfcheck.SelfCheckResult | None:
    methods = _TRIED[config.method]
    if not methods:
        return None
    projectors = dict(model.projectors())
    return selfcheck.run(model, restorer, projectors, device.pool, device.forward, methods)


def _profile(
    config: HCacheConfig,
    model: ServedModel,
    device: Device,
    restorer: LayerRestorer,
    disk: DiskStore | None,
    machine: str,
) -> Profile | None:
    if not _predicts(config) and config.save_profile is None:
        return None
    longest = min(device.largest_pass, device.tree.capacity() // 4, model.context_length)
    bench = Bench(
        model, restorer, device.forward, disk, longest, config.measure_s, config.run_chunks, machine
    )
    return find_profile(config, bench)


def _budget(config: HCacheConfig, layout: StateLayout, device: Device, context_length: int) -> HostBudget:
    if config.method is PlanKind.RECOMPUTE:
        return HostBudget.least()
    largest_pass, staged_passes = device.largest_pass, device.staged_passes
    budget = HostBudget.of(config, layout, largest_pass=largest_pass, staged_passes=staged_passes)
    longest, remedy = largest_pass, "or lower --chunked-prefill-size"
    if not device.cuts_prompts:
        longest = max(largest_pass, min(context_length, device.tree.capacity()))
        remedy = "or cut long prompts with --chunked-prefill-size"
    remedy = f"raise --hcache-host-size or staging_size, {remedy}"
    if budget.ring_rows < longest:
        logger.warning(
            "hcache: staging holds %d tokens, a prefill pass may have %d, and the rest is not saved; %s",
            budget.ring_rows, longest, remedy,
        )  # fmt: skip
    elif budget.ring_rows < staged_passes * largest_pass:
        logger.warning(
            "hcache: staging holds %d tokens, not %d prefill passes of up to %d: of a long prompt not every pass is "
            "saved; %s", budget.ring_rows, staged_passes, largest_pass, remedy,
        )  # fmt: skip
    return budget


def _tiers(
    config: HCacheConfig,
    layout: StateLayout,
    budget: HostBudget,
    disk: DiskStore | None,
    left_out: StoreStats | None,
    open_late: Callable[[], DiskStore] | None,
    counters: Counters,
    device: Device,
) -> TieredStore:
    memory = device.host_memory(budget.num_slots * layout.chunk_bytes)
    may_group = not device.is_cpu and budget.num_slots >= _FEWEST_GROUPS * _GROUP_SLOTS
    group_slots = _GROUP_SLOTS if may_group else 1
    host = HostTier(memory, layout, counters, keep_dirty=disk is not None, group_slots=group_slots)
    stats = left_out if disk is None else disk.stats()
    run_chunks = config.run_chunks if stats is None else longest_run(config, layout, stats.cap_bytes)
    return TieredStore(
        host,
        disk,
        counters,
        write_policy=config.write_policy,
        run_chunks=run_chunks,
        piece_chunks=PIECE_CHUNKS if device.is_cpu else 1,  # else the device itself copies them together
        left_out=left_out,
        open_late=open_late,
    )


def _log_model(
    config: HCacheConfig,
    model: ServedModel,
    stored: Sequence[Method],
    check: selfcheck.SelfCheckResult | None,
) -> None:
    shape = model.shape
    sizes = (
        format_bytes(shape.num_layers * shape.hidden_row_bytes),
        format_bytes(shape.num_layers * shape.kv_row_bytes),
    )
    if check is None:
        logger.info(
            "hcache: %s, %d layers; hidden states %s a token, K and V %s a token; method recompute: nothing is "
            "stored or restored", model.architecture, shape.num_layers, *sizes,
        )  # fmt: skip
        return
    if check.why_not_hidden is not None:
        logger.warning("hcache: hidden states are not used: %s", check.why_not_hidden)
    logger.info(
        "hcache: %s, %d layers; hidden states %s a token, K and V %s a token; method %s%s; "
        "self-check error %.2g (tolerance %.2g)%s%s",
        model.architecture, shape.num_layers, *sizes, describe(stored),
        "" if config.method in (PlanKind.HIDDEN, PlanKind.KV) else f" ({config.method})",
        check.error, check.tolerance,
        "" if check.projector is None else f"; projector {check.projector}",
        "" if check.may_recompute or config.method in (PlanKind.HIDDEN, PlanKind.KV)
        else "; the first layers are not recomputed",
    )  # fmt: skip
    if config.method is PlanKind.HIDDEN and shape.hidden_row_bytes > shape.kv_row_bytes:
        logger.warning(
            "hcache: this model's hidden states are %.1f times as large as its K and V (grouped-query "
            "attention); --hcache-method auto stores K and V", shape.hidden_row_bytes / shape.kv_row_bytes,
        )  # fmt: skip


def _log_tiers(config: HCacheConfig, tiers: TieredStore, budget: HostBudget) -> None:
    disk = "no disk tier (give --hcache-dirs for one)"
    stats = tiers.disk_stats
    if stats is not None and tiers.disk is None:
        disk = "no disk tier (it cannot be opened yet)"
    elif stats is not None:
        disk = f"disk tier {format_bytes(stats.cap_bytes)} with {stats.chunks} chunks in it"
        budget_bytes = config.disk_write_budget
        disk += (
            ", no write budget"
            if budget_bytes is None
            else f", {format_bytes(budget_bytes)} written a day at most"
        )
        if config.disk_max_age is not None:
            disk += f", each kept for {format_duration(config.disk_max_age)} at most"
    logger.info(
        "hcache: host tier %s for %d tokens, staging for %d; %s; %s",
        format_bytes(config.host_size), tiers.host.num_slots * CHUNK_TOKENS, budget.ring_rows, disk,
        config.write_policy,
    )  # fmt: skip


def prediction_text(gate: RestoreGate, longest: int) -> str:
    """What is predicted on an idle server, and from which length on restores pay, of up to ``longest`` tokens."""
    tier = planned_tier(gate.profile)
    decision = gate.decide({tier: PLANNED_TOKENS}, 0)
    recomputed = f" (first {decision.num_recompute} layers recomputed)" if decision.num_recompute else ""
    lengths = {tier: gate.pays_from(tier, longest) for tier in gate.profile.tiers}
    pays = [
        f"from {least:,} tokens ({tier})" if least else f"never ({tier})" for tier, least in lengths.items()
    ]
    return (
        f"predicted for {PLANNED_TOKENS:,} tokens from {tier}: restore {1e3 * decision.restore_s:.1f} ms{recomputed}, "
        f"recompute {1e3 * decision.recompute_s:.1f} ms; restores pay {', '.join(pays)}"
    )
