"""From chunks that are in a tier to a restore that can start: which way, and with which deadline."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from sglang_hcache.core.config import HCacheConfig, RestoreWhen
from sglang_hcache.core.errors import RestoreError, RestoreTimeoutError, StoreError, TierMissError
from sglang_hcache.core.keys import ChunkKey
from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.restore.decision import Decision
from sglang_hcache.restore.gate import IDLE, LOADED, Load, RestoreGate
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.pace import YIELDING_SHARE
from sglang_hcache.sglang_plugin.seam.protocols import Device, DeviceMatch
from sglang_hcache.sglang_plugin.serving.tickets import Restore, Ticket
from sglang_hcache.sglang_plugin.serving.waiting import Waiting
from sglang_hcache.tier.tiered import DISK, HOST, ChunkLease, TieredStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a restore that could start now."""

    decision: Decision | None
    """How it would go; None if nobody can tell."""
    starts: bool
    """Whether it pays, or is to be tried."""
    idle_s: float
    """For how long at least it would wait for its request to be admitted."""
    head: int
    """Chunks that all ranks have in host memory before the first one that is on disk; 0: none, or none is on disk."""
    leaves_rest: bool = False
    """Whether restoring those alone and computing the rest is faster."""

    @property
    def is_try(self) -> bool:
        return self.decision is not None and self.decision.is_try


class RestoreMaker:
    """Says what a restore would take and whether it pays, makes it, and computes what it does not read.

    When one starts and who owns its slots is for others.

    Args:
        block_chunks: most chunks that a restore reads at a time.
        gate: says how to restore, and what is worth it; None: all, as it is stored.
    """

    def __init__(
        self,
        device: Device,
        tiers: TieredStore,
        config: HCacheConfig,
        observer: Observer,
        block_chunks: int,
        gate: RestoreGate | None,
    ) -> None:
        self._device = device
        self._ranks = device.ranks
        self._tiers = tiers
        self._config = config
        self._observer = observer
        self._block_chunks = block_chunks
        self._gate = gate
        self._restores_all = config.restore is RestoreWhen.ALWAYS
        self._pace = None if device.gpu is None else device.gpu.stage.pace
        self._may_trace = Throttle()

    def find(self, prompts: Sequence[Sequence[ChunkKey]]) -> list[int]:
        """How many chunks of each are in some tier, from the first one on. Looks into memory only."""
        found = [self._tiers.match(keys) for keys in prompts]
        return [int(count) for count in self._ranks.minimum(*found)]

    def looked_up(self, *, is_hit: bool) -> None:
        """Count a request that looked for the chunk behind those on the device."""
        self._observer.count("lookup.requests")
        self._observer.count("lookup.hits" if is_hit else "lookup.misses")

    def missed(self, ticket: Ticket, keys: Sequence[ChunkKey]) -> None:
        """The first of ``keys`` was in no tier: count that once for each request; none: nothing was missing."""
        if keys and not ticket.has_missed:
            ticket.has_missed = True
            # Not new either if it is gone on another rank alone.
            is_known = self._tiers.was_evicted(keys[0]) or keys[0] in self._tiers
            (is_new,) = self._ranks.minimum(not is_known)
            self._observer.count("lookup.missed_new" if is_new else "lookup.missed_evicted")

    def decide(self, keys: Sequence[ChunkKey], start: int, behind_s: float) -> Verdict:
        """How to bring ``keys`` back, behind the prefix of ``start`` tokens, and whether to start: if it pays
        (:meth:`Decision.pays`), or is to be tried (:meth:`RestoreGate.is_due`).
        """
        on_host = self._tiers.on_host(keys)
        # The slowest counts.
        num_on_host, head = self._ranks.minimum(sum(on_host), [*on_host, False].index(False))
        verdict = self._decide(len(keys), int(num_on_host), int(head % len(keys)), start, behind_s)
        return self._ranks.from_first(verdict)

    def _decide(self, num_chunks: int, on_host: int, head: int, start: int, behind_s: float) -> Verdict:
        if self._gate is None:
            return Verdict(None, True, 0.0, head)
        tokens = {HOST: CHUNK_TOKENS * on_host, DISK: CHUNK_TOKENS * (num_chunks - on_host)}
        load = self._load()
        decision, without_s = self._gate.decide(tokens, start, load), math.inf
        if head and not self._restores_all:
            # A slow disk under the tail of a prefix must not cost the head, which host memory has.
            part_s = self._part_s(head, num_chunks - head, start, load)
            instead = replace(decision, recompute_s=part_s)
            if not instead.pays():
                decision, without_s = instead, part_s
        leaves_rest = without_s < math.inf
        starts = self._restores_all or (not leaves_rest and decision.pays(behind_s))
        if not starts and behind_s <= 0 and self._gate.is_due(decision):
            decision = self._gate.decide(tokens, start, load, is_try=True, without_s=without_s)
            starts, leaves_rest = True, False
        idle_s = max(0.0, -behind_s - decision.restore_s)
        return Verdict(decision, starts, idle_s, head, leaves_rest)

    def _part_s(self, head: int, rest: int, start: int, load: Load) -> float:
        """What it takes to restore ``head`` chunks from host memory, and to compute those behind them; infinite if that
        does not pay.
        """
        assert self._gate is not None
        part = self._gate.decide({HOST: CHUNK_TOKENS * head}, start, load)
        rest_s = self._gate.prefill_s(CHUNK_TOKENS * rest, start + CHUNK_TOKENS * head)
        return part.restore_s + rest_s if part.pays() else math.inf

    def is_worth_awaiting(self, num_tokens: int, start: int, left_s: float) -> bool:
        """Whether another request's restore, which takes ``left_s`` more, brings ``num_tokens`` from position ``start``
        on sooner than computing them does. True where nobody can tell.
        """
        return self._ranks.from_first(self._gate is None or left_s < self.prefill_s(num_tokens, start))

    def may_overtake(self, left_s: float) -> float:
        """How many tokens may be computed before a request whose restore has ``left_s`` to go.

        One pass in any case, and more as long as they take at most twice ``left_s``: so all requests together wait the
        least.
        """
        pass_tokens = self._device.largest_pass
        pass_s = self.prefill_s(pass_tokens, 0)
        most = pass_tokens * max(1.0, 2 * left_s / pass_s) if pass_s else math.inf
        return self._ranks.from_first(most)

    def keep_pace(self, waiting: Waiting, running: Iterable[Restore]) -> None:
        """Once a scheduler round: decide whether restores leave most of a GPU to requests that run.

        They do not if several requests wait for restores: a slow one would hold up those behind it.
        """
        if self._pace is None:
            return
        if self._pace.turn(self._device.scheduler.is_running() and waiting.num_restoring <= 1):
            for restore in running:
                # The device was asked for all of one that is in the tree: for that one nothing changes.
                restore.is_disturbed |= restore.depends_on_pace and not restore.is_in_tree

    def _load(self) -> Load:
        if self._pace is not None and self._pace.yields:
            return Load(LOADED.computing, 1 / YIELDING_SHARE)
        return LOADED if self._device.scheduler.is_running() else IDLE

    def prefill_s(self, num_tokens: int, start: int) -> float:
        """What computing ``num_tokens`` from position ``start`` on is predicted to take; 0 if nobody can tell."""
        return 0.0 if self._gate is None else self._gate.prefill_s(num_tokens, start)

    def give_up_late(self, restores: Iterable[Restore]) -> None:
        """Stop those of ``restores`` that have waited for others for longer than they may: now, not when it is their
        turn."""
        for restore in restores:
            if restore.job.state is not RestoreState.QUEUED:
                continue
            try:
                restore.job.check()
            except RestoreError as error:
                restore.ran_out_of_time = isinstance(error, RestoreTimeoutError)
                restore.abandon()

    def advance(self, restores: Iterable[Restore]) -> None:
        """Compute a piece of the first of ``restores`` that wants it: decoding of others goes on between pieces."""
        restore = next((restore for restore in restores if restore.is_recomputing), None)
        if restore is None:
            return
        assert restore.ticket is not None, "one that nobody wants is stopped"
        try:
            restore.job.check()
            if self._device.gpu is not None:
                self._device.gpu.stage.passes.begin()
            first = restore.start + restore.num_computed
            end = min(first + self._device.largest_pass, restore.end)
            tokens, slots = restore.ticket.prompt.tokens[:end], restore.slots[:end]
            seconds = self._device.forward.extend(tokens, slots, first, restore.num_recompute)
            restore.computed(end - first, seconds)
        except RestoreError as error:
            logger.debug("hcache: a restore of %d tokens ends: %r", restore.job.num_tokens, error)
            restore.ran_out_of_time = isinstance(error, RestoreTimeoutError)
            restore.abandon()
        except Exception:
            if self._may_trace():
                logger.exception("hcache: layers of a restore could not be recomputed")
            self._observer.count("restore.errors")
            restore.abandon()

    def _depends_on_pace(self, layers: Sequence[int], decision: Decision | None) -> bool:
        """A restore's :attr:`Restore.depends_on_pace`."""
        methods = self._tiers.layout.methods
        if self._pace is None or all(methods[layer] is not Method.HIDDEN for layer in layers):
            return False  # only projections are slowed
        # Where reads decide at the slowest pace, faster projections would be waiting as well.
        return not (self._pace.yields and decision is not None and decision.waits_for_reads)

    def prepare(
        self,
        ticket: Ticket,
        match: DeviceMatch,
        keys: Sequence[ChunkKey],
        slots: torch.Tensor,
        decision: Decision | None,
        backlog_s: float,
    ) -> Restore:
        """A restore of ``keys`` into ``slots``, behind ``match``.

        Raises:
            TierMissError, StoreError: one of the chunks is gone, on some rank; nothing is held then.
        """
        layers, deadline_s = tuple(range(self._tiers.layout.num_layers)), self._config.restore_deadline_s
        if decision is not None:
            layers = decision.layers
            if not self._restores_all:
                deadline_s = decision.deadline_s(backlog_s)
        gpu = self._device.gpu
        fence = None if gpu is None else gpu.stage.fence()
        is_whole = len(layers) == self._tiers.layout.num_layers
        leases = self._lease(keys, promote=is_whole)
        job = RestoreJob(leases, len(match), slots, deadline_s, layers, fence)
        if decision is not None and self._gate is not None:
            self._gate.begins(decision)
        by_pace = self._depends_on_pace(layers, decision)
        restore = Restore(job, match.slots, match.node, ticket, decision, by_pace)
        if restore.num_recompute:
            self._observer.count("restore.layers_recomputed", restore.num_recompute)
        return restore

    def _lease(self, keys: Sequence[ChunkKey], *, promote: bool) -> tuple[ChunkLease, ...]:
        """Hold ``keys`` in blocks that a restore reads at a time; all of them or, with an error, none on any rank."""
        leases, gone = (), None
        try:
            leases = self._lease_here(keys, promote=promote)
        except (TierMissError, StoreError) as error:
            gone = error
        (all_hold,) = self._ranks.minimum(gone is None)
        if not all_hold:
            for lease in leases:
                lease.close()
            raise gone or TierMissError("one of the chunks is gone on another rank")
        return leases

    def _lease_here(self, keys: Sequence[ChunkKey], *, promote: bool) -> tuple[ChunkLease, ...]:
        step = self._block_chunks
        with ExitStack() as holds:
            leases = [
                holds.enter_context(self._tiers.lease(keys[first : first + step], promote=promote))
                for first in range(0, len(keys), step)
            ]
            holds.pop_all()
            return tuple(leases)
