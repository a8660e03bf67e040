"""SGLang 0.5.17: what the tier asks of its scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, CacheAgnosticPolicy
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

from sglang_hcache.sglang_plugin.seam.protocols import QueuedRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_STEADY = CacheAgnosticPolicy.FCFS, CacheAgnosticPolicy.LOF
"""Policies that order requests by what they ask for, not by chance, by what is on the device, or by what runs."""

_DOZE_MS, _BLIND_DOZE_MS, _NAP_MS = 50, 5, 1
"""A round for nothing takes the interpreter from who restores for half a millisecond or more. Where nobody sees here
that requests come, as on other ranks, those must not wait for long."""


class SchedulerOf:
    """SGLang's scheduler as our ``SchedulerView``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def is_running(self) -> bool:
        last = self._scheduler.last_batch
        return (
            not self._scheduler.running_batch.is_empty()
            or self._scheduler.chunked_req is not None
            or (last is not None and not last.is_empty())
        )

    def metric_labels(self) -> dict[str, str] | None:
        collector = self._scheduler.metrics_collector
        if (
            collector is None
            or not self._scheduler.metrics_collector_context.current_scheduler_metrics_enabled
        ):
            return None
        return {name: str(value) for name, value in collector.labels.items()}

    def waiting(self) -> Iterator[QueuedRequest]:
        scheduler = self._scheduler
        # Of the next batch as SGLang fills it: with who runs, then with one after the other in the queue.
        running = self._running() if scheduler.enable_lora else ()
        adapters = {req.lora_id for req in running if not req.finished()}
        for req in scheduler.waiting_queue:
            new_tokens = _remaining_tokens(req) + scheduler.page_size
            is_passed_over = scheduler.enable_lora and not scheduler._can_schedule_lora_req(req, adapters)
            if not is_passed_over:
                adapters.add(req.lora_id)
            yield QueuedRequest(req.rid, len(req.full_untruncated_fill_ids), new_tokens, is_passed_over)

    def order_queue(self) -> None:
        policy = self._scheduler.policy
        if policy.policy in _STEADY:
            policy.calc_priority(self._scheduler.waiting_queue)

    def prefilling(self) -> tuple[int, int]:
        chunked = self._scheduler.chunked_req
        if chunked is None:
            return 0, 0
        position = len(chunked.prefix_indices)
        return len(chunked.full_untruncated_fill_ids) - position, position

    def looks_at_queue(self) -> bool:
        scheduler, batch = self._scheduler, self._scheduler.running_batch
        if scheduler.chunked_req is not None or scheduler.enable_priority_preemption:
            return True
        return not batch.batch_is_full and scheduler.get_num_allocatable_reqs(len(batch.reqs)) > 0

    def places(self) -> int:
        return int(self._scheduler.get_num_allocatable_reqs(len(self._running())))

    def look_again(self) -> None:
        # SGLang does so when a request ends: nothing else makes room there.
        self._scheduler.running_batch.batch_is_full = False

    def doze(self, bell: int | None) -> None:
        scheduler, channels = self._scheduler, self._scheduler.ipc_channels
        come_here = channels.recv_from_tokenizer
        sees_requests = come_here is not None and come_here is scheduler.recv_from_tokenizer
        sockets = [come_here, channels.recv_from_rpc] if sees_requests else []
        is_alone = sees_requests and scheduler.server_args.tp_size == 1
        # Nothing rings when a grammar has been compiled.
        is_told = is_alone and not scheduler.grammar_manager.has_waiting_grammars()
        if bell is not None:
            IdleSleeper([bell, *sockets]).poller.poll(_DOZE_MS if is_told else _BLIND_DOZE_MS)
        elif sockets:
            IdleSleeper(sockets).poller.poll(_NAP_MS)
        else:  # polling nothing takes no time
            time.sleep(_NAP_MS / 1e3)

    def reserved_tokens(self) -> int:
        ratio = self._scheduler.new_token_ratio_tracker.current
        # Whole numbers first: a sum of fractions may differ between ranks, for each has its requests in another order.
        tokens = int(ratio * sum(_remaining_tokens(req) for req in self._running()))
        return tokens + self.prefilling()[0]

    def _running(self) -> set[Req]:
        # A last batch that prefilled has not been merged yet where SGLang keeps what runs; a mixed one took all of it.
        # Whose prompt goes on in the next pass is in neither.
        batches = self._scheduler.running_batch, self._scheduler.last_batch
        chunked = self._scheduler.chunked_req
        found = {req for batch in batches if batch is not None for req in batch.reqs}
        return found if chunked is None else found | {chunked}


def _remaining_tokens(req: Req) -> int:
    return max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS))
