"""From a configuration and a loaded model to a tier that serves: check, measure, plan, build."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sglang_hcache.core.config import HCacheConfig, RestoreWhen
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, Method, PlanKind, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import available_host_bytes
from sglang_hcache.device.row_writers import load_layer_writer, load_row_writer
from sglang_hcache.plan.profile import Profile
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.lanes import Lanes
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.sglang_plugin.seam.budget import HostBudget, longest_run
from sglang_hcache.sglang_plugin.seam.gpu import may_store_hidden
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.sglang_plugin.serving.metrics import MetricsObserver
from sglang_hcache.sglang_plugin.setup import selfcheck
from sglang_hcache.sglang_plugin.setup.disk_at_start import open_disk, open_late
from sglang_hcache.sglang_plugin.setup.measuring import Bench
from sglang_hcache.sglang_plugin.setup.planning import choose_stored, find_profile, mix_on
from sglang_hcache.sglang_plugin.setup.start_lines import log_model, log_tiers, prediction_text
from sglang_hcache.store import DiskStore, StoreStats
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)


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
    return _Assembly(config, model, device).run(machine)


class _Assembly:
    """What the steps of :func:`assemble` share."""

    def __init__(self, config: HCacheConfig, model: ServedModel, device: Device) -> None:
        self._asked = config
        self._config = _without_hidden_states(config, model)
        """What was asked for, without what turned out not to work."""
        self._model = model
        self._device = device
        self._labels = device.scheduler.metric_labels()
        self._counters = Counters(MetricsObserver(self._labels) if self._labels is not None else None)
        self._restorer = restorer_of(model, device)
        self._check: selfcheck.SelfCheckResult | None = None
        self._disk: DiskStore | None = None
        self._left_out: StoreStats | None = None
        """What to tell of the disk tier that this server does without."""

    def run(self, machine: Callable[[Sequence[Path]], str]) -> Bridge:
        """Once. Raises as :func:`assemble`."""
        self._run_check()
        self._open_disk()
        try:
            return self._build(machine)
        except BaseException:
            if self._disk is not None:
                self._disk.close()
            raise

    def _run_check(self) -> None:
        methods = self._config.method.stored
        if not methods:
            return
        projectors = dict(self._model.projectors())
        self._check = selfcheck.run(self._model, self._restorer, projectors, self._device, methods)
        self._restorer = self._check.restorer
        if self._restorer.projector is None:
            self._config = self._config.without_hidden_states()

    def _open_disk(self) -> None:
        model = self._model
        self._disk, self._left_out = open_disk(
            self._config, model.shape.hidden_size, self._counters, model.ranks
        )

    def _build(self, machine: Callable[[Sequence[Path]], str]) -> Bridge:
        config, model, device = self._config, self._model, self._device
        restorer, counters, labels = self._restorer, self._counters, self._labels
        on_disk = None if self._disk is None else mix_on(self._disk, model.shape)
        profile = self._profile(machine(() if self._disk is None else config.dirs))
        weights = model.weights()
        stored = choose_stored(config, profile, model.shape, on_disk)
        layout = model.layout(stored)
        budget = budget_of(config, layout, device, model.context_length)
        tiers = self._tiers(layout, budget)
        gate = None if profile is None else self._gate(profile, stored, budget.block_chunks)
        namespace = model.namespace(layout, weights)
        bridge = Bridge(config, model, namespace, tiers, budget, device, restorer, gate, counters, labels)
        log_model(self._asked, model, stored, self._check)
        if config.method is not PlanKind.RECOMPUTE:
            log_tiers(config, tiers, budget, device.tree.capacity(), device.ranks.size)
        logger.info("hcache: namespace %s (weights %s)", namespace.namespace_id().hex(), weights.hex()[:8])
        if gate is not None:
            logger.info("hcache: %s", prediction_text(gate, model.context_length))
        return bridge

    def _profile(self, machine: str) -> Profile | None:
        config, model, device, restorer = self._config, self._model, self._device, self._restorer
        if not _predicts(config) and config.save_profile is None:
            return None
        longest = min(device.largest_pass, device.tree.capacity() // 4, model.context_length)
        # A profile that is saved is for other methods as well.
        is_kept = config.save_profile is not None
        asked = is_kept or may_store_hidden(model, config.method)
        hidden = asked and restorer.projector is not None
        bench = Bench(
            *(model, restorer, device, self._disk, longest, config.measure_s, machine),
            hidden=hidden,
            is_exact=is_kept,
        )
        return find_profile(config, bench)

    def _tiers(self, layout: StateLayout, budget: HostBudget) -> TieredStore:
        config, device, disk, left_out = self._config, self._device, self._disk, self._left_out
        memory = device.host_memory(budget.num_slots * layout.chunk_bytes)
        host = HostTier(memory, layout, self._counters, keep_dirty=disk is not None)
        stats = left_out if disk is None else disk.stats()
        late = partial(open_late, self._asked, self._model.shape, self._counters, layout.methods)
        return TieredStore(
            host,
            disk,
            self._counters,
            write_policy=config.write_policy,
            run_chunks=RUN_CHUNKS if stats is None else longest_run(layout, stats.cap_bytes),
            left_out=left_out,
            open_late=None if left_out is None else late,
        )

    def _gate(self, profile: Profile, stored: Sequence[Method], block_chunks: int) -> RestoreGate | None:
        config, device, check = self._config, self._device, self._check
        if not _predicts(config) or self._model.ranks.rank != 0:
            return None
        return RestoreGate(
            profile,
            stored,
            CHUNK_TOKENS * block_chunks,
            may_recompute=Method.RECOMPUTE in config.method.methods
            and check is not None
            and check.may_recompute,
            pass_tokens=device.largest_pass if device.cuts_prompts else math.inf,
        )


def restorer_of(model: ServedModel, device: Device) -> LayerRestorer:
    """What writes K and V of ``model`` into the pool of ``device``; without a projector."""
    rows, lanes = load_row_writer(is_cpu=device.is_cpu), Lanes() if device.is_cpu else None
    stage = None if device.gpu is None else device.gpu.stage
    shape, pool = model.shape, device.pool
    layers = None if stage is None else load_layer_writer(pool, shape.num_layers)
    return LayerRestorer(model.row_dtype, pool, shape.num_kv_heads, None, rows, lanes, stage, layers)


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
    return Method.RECOMPUTE in config.method.methods or config.restore is RestoreWhen.FASTER


def budget_of(config: HCacheConfig, layout: StateLayout, device: Device, context_length: int) -> HostBudget:
    if config.method is PlanKind.RECOMPUTE:
        return HostBudget.least()
    largest_pass, staged_passes, ranks = device.largest_pass, device.staged_passes, device.ranks
    # All ranks look before one of them takes anything.
    (available,) = ranks.minimum(available_host_bytes())
    budget = HostBudget.of(
        config,
        layout,
        pass_rows=device.pass_rows,
        staged_passes=staged_passes,
        num_ranks=ranks.size,
        available=int(available),
    )
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
