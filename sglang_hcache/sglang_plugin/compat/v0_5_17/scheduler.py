"""SGLang 0.5.17: what the tier asks of its scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_hcache.sglang_plugin.compat.v0_5_17.adapters import AdaptersInBatch
from sglang_hcache.sglang_plugin.seam.protocols import QueuedRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_CLIP_NEW_TOKENS = 4096  # SGLang's own clip of max_new_tokens when it estimates (CLIP_MAX_NEW_TOKENS)


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
        scheduler, adapters = self._scheduler, None
        if scheduler.enable_lora:
            manager = scheduler.tp_worker.model_runner.lora_manager
            adapters = AdaptersInBatch(manager, scheduler.lora_drainer, self._running())
        for req in scheduler.waiting_queue:
            new_tokens = _remaining_tokens(req) + scheduler.page_size
            is_passed_over = adapters is not None and not adapters.takes(req)
            yield QueuedRequest(req.rid, len(req.full_untruncated_fill_ids), new_tokens, is_passed_over)

    def look_again(self) -> None:
        # SGLang does so when a request ends: nothing else makes room there.
        self._scheduler.running_batch.batch_is_full = False

    def reserved_tokens(self) -> int:
        ratio = self._scheduler.new_token_ratio_tracker.current
        chunked = self._scheduler.chunked_req
        # Whole numbers first: a sum of fractions may differ between ranks, for each has its requests in another order.
        tokens = int(ratio * sum(_remaining_tokens(req) for req in self._running()))
        if chunked is not None:
            tokens += len(chunked.full_untruncated_fill_ids) - len(chunked.prefix_indices)
        return tokens

    def _running(self) -> set[Req]:
        # A last batch that prefilled has not been merged yet where SGLang keeps what runs; a mixed one took all of it.
        # Whose prompt goes on in the next pass is in neither.
        batches = self._scheduler.running_batch, self._scheduler.last_batch
        chunked = self._scheduler.chunked_req
        found = {req for batch in batches if batch is not None for req in batch.reqs}
        return found if chunked is None else found | {chunked}


def _remaining_tokens(req: Req) -> int:
    return max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), _CLIP_NEW_TOKENS))
