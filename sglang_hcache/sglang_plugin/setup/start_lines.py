"""What the log says of a server's tier when it starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_hcache.core.config import KV_POOLS, HCacheConfig, host_size_for
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.core.units import format_bytes, format_duration
from sglang_hcache.plan.stored import PLANNED_TOKENS, planned_tier
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.sglang_plugin.seam.budget import HostBudget
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.setup.planning import describe
from sglang_hcache.sglang_plugin.setup.selfcheck import SelfCheckResult
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_FEW_POOLS = 1.5
"""With less host memory than so many KV pools, less than a third of what returned was found there, in a simulation."""


def log_model(
    config: HCacheConfig,
    model: ServedModel,
    stored: Sequence[Method],
    check: SelfCheckResult | None,
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
            "attention); --hcache-method kv stores K and V", shape.hidden_row_bytes / shape.kv_row_bytes,
        )  # fmt: skip


def log_tiers(
    config: HCacheConfig, tiers: TieredStore, budget: HostBudget, pool_tokens: int, num_ranks: int = 1
) -> None:
    """
    Args:
        config: one rank's share.
        pool_tokens: that the KV pool holds.
    """
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
    if tiers.host.num_slots * CHUNK_TOKENS < _FEW_POOLS * pool_tokens:
        row_bytes = sum(tiers.layout.row_bytes)
        logger.log(
            logging.INFO if tiers.may_have_disk else logging.WARNING,
            "hcache: the KV pool holds %d tokens, and the host tier less than %g times as many: much of what the pool "
            "drops has left the host tier before, so little is restored from there; for %g times as many set "
            "--hcache-host-size to %s, or give the pool less (--max-total-tokens)", pool_tokens, _FEW_POOLS, KV_POOLS,
            format_bytes(num_ranks * host_size_for(budget.ring_rows * row_bytes, KV_POOLS * pool_tokens * row_bytes)),
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
