"""One server's tier: built once, fed by the hooks, closed at the end."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from sglang_hcache import __version__
from sglang_hcache.core.config import HCacheConfig, WritePolicy
from sglang_hcache.core.keys import ChunkKey, Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.core.observer import Counters
from sglang_hcache.restore.engine import RestoreEngine
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pipeline import NUM_BUFFERS, LayerPipeline
from sglang_hcache.sglang_plugin.seam.budget import HostBudget
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device, Prompt
from sglang_hcache.sglang_plugin.serving.idling import Idling
from sglang_hcache.sglang_plugin.serving.last_writes import LastWrites
from sglang_hcache.sglang_plugin.serving.metrics import TierGauges
from sglang_hcache.sglang_plugin.serving.outcomes import Outcomes
from sglang_hcache.sglang_plugin.serving.owners import Owners
from sglang_hcache.sglang_plugin.serving.restore_maker import RestoreMaker
from sglang_hcache.sglang_plugin.serving.restores import RestoreCoordinator
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.sglang_plugin.serving.saving import Saving
from sglang_hcache.sglang_plugin.serving.state import tier_state, why_nothing_is_saved
from sglang_hcache.sglang_plugin.serving.weights_in_use import WeightsInUse
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)


class Bridge:
    """Everything behind the plugin's hooks. Version-neutral: it sees SGLang through ``protocols`` only.

    Args:
        labels: of this process's metrics; None: there are none.
    """

    def __init__(
        self,
        config: HCacheConfig,
        model: ServedModel,
        namespace: Namespace,
        tiers: TieredStore,
        budget: HostBudget,
        device: Device,
        restorer: LayerRestorer,
        gate: RestoreGate | None,
        counters: Counters,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.counters = counters
        self.tiers = tiers
        self.adapters = device.adapters
        self._gpu = device.gpu
        self.ranks = device.ranks
        self.weights = WeightsInUse(model, tiers.layout, namespace)
        self._owners = Owners(tiers, model.shape.name)
        self._unnamed: list[Prompt] = []  # of requests that came when nobody knew what the weights are
        self._owes_demotion = False  # of all: the device was reset while nobody knew what the weights are
        self._captures, self._is_on = config.method is not PlanKind.RECOMPUTE, True
        self.saving = Saving(model, tiers, budget, device, counters, gate, captures=self._captures)
        running = Running(device.ranks)
        num_buffers = NUM_BUFFERS if config.dirs else 0  # as in HostBudget
        pipeline = LayerPipeline(tiers, restorer, budget.block_chunks, device.host_memory, num_buffers)
        self._engine = RestoreEngine(pipeline, counters, running.one_has_changed)
        self._maker = maker = RestoreMaker(device, tiers, config, counters, budget.block_chunks, gate)
        outcomes = Outcomes(device, tiers.layout, counters, gate)
        self.restores = RestoreCoordinator(device, counters, maker, outcomes, self._engine, running)
        self._idling = Idling(self.restores, self.saving)
        self._closed = threading.Event()
        self.last_writes = LastWrites(tiers, counters)
        self._stored = (
            tiers.layout.methods if self._captures else (Method.RECOMPUTE,) * tiers.layout.num_layers
        )
        self._gauges = None if labels is None else TierGauges(labels, self.state, counters)

    # -- requests --------------------------------------------------------------------------------

    def queue(self, prompt: Prompt) -> None:
        """A request enters the waiting queue."""
        if not (self._captures and self._is_on):
            return
        if self.weights.namespace is None:
            # SGLang takes requests also while it has lent the memory of the weights.
            self._unnamed.append(prompt)
            return
        keys = chunk_keys(self._namespace_of(prompt.tenant).root_key(), prompt.tokens)
        self.tiers.touch(keys)
        self.restores.queue(prompt, keys)

    def may_begin_at(self, rid: str, tenant: str | None, position: int, tail: array[int]) -> bool:
        """Whether a queued request may be computed from ``position`` on and leave no gap in what is saved of it.

        Args:
            tail: its tokens between the last multiple of 64 and ``position``.
        """
        if not (tail and self._captures and self._is_on):
            return True
        if self.ranks.size > 1:
            return False  # which earlier rows are there still is of each rank's own making
        namespace = self._namespace_of(tenant)
        if self.weights.device_is_stale:
            return True
        chunks = position // CHUNK_TOKENS
        keys = self.restores.waiting.keys_of(rid)
        if chunks > len(keys):
            return False
        parent = keys[chunks - 1] if chunks else namespace.root_key()
        return self.saving.covers(parent, tail)

    def begin_capture(self, rid: str, tenant: str | None, prefix: array[int]) -> None:
        """A request is about to be computed from position ``len(prefix)`` on."""
        if not (self._captures and self._is_on):
            return
        namespace = self._namespace_of(tenant)
        if self.weights.device_is_stale:
            # KV of earlier weights must not be continued into chunks of the present ones. Not without a prefix either:
            # after each piece SGLang puts what the tree has in the place of what the request computed.
            return
        self._owners.note(namespace)
        self.saving.begin(rid, namespace, prefix)

    def one_pass(self, *, prefills: bool) -> AbstractContextManager[bool]:
        """A forward pass is asked for inside, behind restores that the device has not ended.

        Args:
            prefills: whether it computes prompts.

        Returns:
            Yields whether it begins behind all of them, and so waits for none while it computes.
        """
        return nullcontext(True) if self._gpu is None else self._gpu.stage.passes.one_pass(prefills=prefills)

    # -- the device tree -------------------------------------------------------------------------

    @property
    def wants_evictions(self) -> bool:
        """Whether :meth:`evicted` has anything to do."""
        # Not whether the disk tier is open: it may be on some ranks only, and what follows is for all of them.
        return self.tiers.may_have_disk and self.config.write_policy is WritePolicy.WRITE_BACK

    def evicted(self, prefix: array[int], branches: Sequence[array[int]], tenant: str | None) -> None:
        """The device dropped the KV of what followed ``prefix`` in each of ``branches``: demote those chunks."""
        root = self._namespace_of(tenant).root_key()
        num_tokens = len(prefix) + sum(map(len, branches))
        self.tiers.demote(lambda: _keys_behind(root, prefix, branches), num_tokens)

    def kv_arrives(self) -> None:
        """The device gets KV of the weights in use: of a pass, or restored."""
        if self._captures:  # else nobody asks of which weights it is
            self.weights.on_device = self._weights_in_use()

    def device_reset(self) -> None:
        """The device dropped everything."""
        self.weights.device_reset()
        if self.weights.namespace is None:
            self._owes_demotion = True  # unless others come: what the old ones left is not worth a write
        else:
            self.saving.then(self.tiers.demote_all)

    def weights_will_change(self) -> None:
        """The model's weights are about to be replaced or released: nothing may be projected or captured meanwhile.

        If others come, KV on the device is stale until the device is reset (SGLang does that after the update unless
        it is told not to). It is not where the same ones are back, as after an update that failed.
        """
        self.restores.invalidate()
        if self._gpu is not None:
            # What is captured of a pass that the device still computes is taken for what the old weights make of it.
            self._gpu.stage.fence().wait()
        self.saving.end_all()
        self.weights.will_change()  # read anew at the next use: some trainers send weights in many pieces

    # -- upkeep ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a scheduler round, before requests are admitted: the weights are there."""
        self.saving.tick()
        if self._unnamed:
            self._queue_unnamed()
        self._maker.keep_pace(self.restores.waiting, self.restores.running)
        self.restores.tick()
        self._idling.pause()

    def switch(self, *, on: bool) -> None:
        """Off: nothing is saved, looked up or restored. What is stored stays, and is written as if the tier was on."""
        logger.info("hcache: switched %s", "on" if on else "off: nothing is saved or restored")
        self._is_on = on
        if not on:
            self.restores.stop()
            self.saving.end_all()

    def clear(self) -> Callable[[], bool]:
        """Empty both tiers. What they hold is a miss at once.

        Returns:
            Whether a restart cannot bring back what was on disk.
        """
        self.tiers.clear()  # here as well: misses at once, whatever the assembler is at
        is_done = self.saving.clear()
        # In this order: what was computed before is being cleared by the time that this is done.
        return lambda: is_done.is_set() and not self.tiers.is_clearing

    def close(self) -> None:
        """Write to disk what exists only in host memory, within the configured time, and stop. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        ends = time.monotonic() + self.config.shutdown_flush_s
        self.last_writes.begin()  # first: the demoter writes beside what follows
        if self._gauges is not None:
            self._gauges.close()
        self._engine.close()
        self.saving.close(max(0.0, ends - time.monotonic()))
        self.last_writes.finish(max(0.0, ends - time.monotonic()))
        self.tiers.close()  # last: on a slow disk SGLang's patience ends here

    def state(self) -> dict[str, Any]:
        """Numbers for ``/server_info`` and gauges: counters, tiers, requests. From any thread."""
        namespace = self.weights.namespace  # not read for this: the weights may be away now, or on their way
        return {
            **tier_state(self.tiers),
            "version": __version__,
            "settings": self.config.model_dump(mode="json"),
            "ranks": self.ranks.size,
            "counters": self.counters.snapshot(),
            "measures": self.counters.measures(),
            "namespace": None if namespace is None else namespace.namespace_id().hex(),
            "saving": self.saving.is_busy,
            "nothing_saved": why_nothing_is_saved(self._is_on, self._captures, self.weights.device_is_stale),
            "layers": [str(method) for method in self._stored],
            "requests": self.restores.waiting.phases(),
            "captured_requests": self.saving.open_requests,
            "in_flight_tokens": self.restores.running.tokens,
        }

    def _queue_unnamed(self) -> None:
        """Look up those that still wait of the requests that came when nobody knew what the weights are.

        If none does, the weights may still be away: nobody reads them.
        """
        waiting = {request.rid for request in self.restores.scheduler.waiting()}
        prompts, self._unnamed = [prompt for prompt in self._unnamed if prompt.rid in waiting], []
        if prompts:
            self._weights_in_use()
        for prompt in prompts:
            self.queue(prompt)

    def _namespace_of(self, tenant: str | None) -> Namespace:
        adapter = None
        if tenant is not None and self.adapters is not None:
            tenant, adapter = self.adapters.apart(tenant)
        return replace(self._weights_in_use(), tenant=tenant, adapter=adapter)

    def _weights_in_use(self) -> Namespace:
        """The namespace of requests without a tenant. Reads the weights if they may be others than before."""
        if self.weights.namespace is not None:
            return self.weights.namespace
        namespace, are_others = self.weights.read()
        if are_others:
            # Also what passes before have brought, but is not in the tiers yet.
            self.saving.then(self.tiers.give_up_dirty)
        elif self._owes_demotion:
            self.saving.then(self.tiers.demote_all)
        self._owes_demotion = False
        return namespace


def _keys_behind(root: ChunkKey, prefix: array[int], branches: Sequence[array[int]]) -> Iterator[ChunkKey]:
    """Of the chunks that ``branches`` complete."""
    parent = (chunk_keys(root, prefix) or [root])[-1]
    begun = prefix[len(prefix) - len(prefix) % CHUNK_TOKENS :]
    for branch in branches:
        yield from chunk_keys(parent, begun + branch)
