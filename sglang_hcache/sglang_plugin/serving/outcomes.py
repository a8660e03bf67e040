"""What became of restores: counted, reported, and compared with what was predicted."""

from __future__ import annotations

import time
from collections import Counter

from sglang_hcache.core.layout import CHUNK_TOKENS, StateLayout
from sglang_hcache.core.observer import Observer
from sglang_hcache.restore.gate import RestoreGate
from sglang_hcache.restore.pipeline import NUM_READERS
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.serving.tickets import Restore


class Outcomes:
    """Used on the scheduler's thread.

    Args:
        gate: learns from them; None: nobody predicts anything.
    """

    def __init__(
        self, device: Device, layout: StateLayout, observer: Observer, gate: RestoreGate | None
    ) -> None:
        self._ranks = device.ranks
        self._layout = layout
        self._observer = observer
        self._gate = gate

    def over(self, restore: Restore) -> None:
        """It is over: agree with the other ranks on how long it took, report it, and learn from it."""
        job = restore.job
        is_late = restore.is_late and not restore.is_disturbed
        # A pause may have gone on for a moment after its end.
        taken_s = max(0.0, job.taken_s(min(time.monotonic(), restore.ended)) - restore.paused_s)
        # Others need not promote: memory that nobody has touched before may take longer than the reads. It delays only
        # who waits for reads.
        copied_s = min(job.copied_s / NUM_READERS, job.waited_s)
        all_in_time, all_are_certain, *times = self._ranks.minimum(
            not is_late,
            job.is_certain,
            -restore.seconds,
            -taken_s,
            *(copied_s - time_s for time_s in (restore.seconds, job.seconds, job.waited_s)),
        )
        slowest_s, taken_s, *without_copies = (-time_s for time_s in times)
        restore.slowest_s = slowest_s
        self._observer.count(f"restore.{restore.outcome}")
        if restore.is_certain:
            self._report(restore)
        restore.taken_s = taken_s
        if not restore.is_certain:
            restore.is_used = False
        self._report_gain(restore)
        seconds, others_s, waited_s = without_copies
        self._learn(
            restore, seconds, others_s if all_are_certain else None, waited_s, is_late=not all_in_time
        )

    def _learn(
        self, restore: Restore, seconds: float, others_s: float | None, waited_s: float, *, is_late: bool
    ) -> None:
        """Compare what it took with what was predicted. Times are those of the slowest rank.

        Args:
            seconds: for all of it.
            others_s: for the layers that were not recomputed; None: some rank has not brought them.
            waited_s: part of that, for reads.
            is_late: on any rank: the one that decides has to know.
        """
        if self._gate is None or restore.decision is None:
            return
        # One that failed says nothing of how fast the tier is; one that was too late, that it is slower.
        if (restore.is_certain or is_late) and not restore.is_disturbed:
            first_layers_s = restore.computed_s if restore.num_recompute and restore.is_computed else None
            self._gate.restored(
                restore.decision,
                seconds,
                first_layers_s,
                others_s=others_s,
                waited_s=waited_s,
                is_complete=restore.is_certain,
            )

    def served(self, restore: Restore, *, is_used: bool) -> None:
        """Its request runs with what it brought, or never will. It may not be over yet."""
        restore.is_used = is_used
        self._report_gain(restore)

    def _report_gain(self, restore: Restore) -> None:
        """What it saved the request that waited for it, or cost it, against recomputing at once: when both are known,
        what it took and whether it was of use.
        """
        taken_s, decision = restore.taken_s, restore.decision
        if taken_s is None or restore.is_used is None or decision is None:
            return
        gain_s = decision.recompute_s - taken_s
        if not restore.is_used:
            reason = "unused" if restore.is_certain else restore.outcome
            self._observer.observe(f"restore.lost_seconds_{reason}", taken_s)
        elif gain_s >= 0:
            self._observer.observe("restore.saved_seconds", gain_s)
        else:
            self._observer.observe("restore.lost_seconds_slower", -gain_s)

    def _report(self, restore: Restore) -> None:
        """One that ended well."""
        job, observer = restore.job, self._observer
        chunk_bytes = sum(self._layout.chunk_layer_bytes[layer] for layer in job.layers)
        observer.count("restore.tokens", job.num_tokens)
        chunks_by_tier = Counter(job.sources)
        source = next(iter(chunks_by_tier)) if len(chunks_by_tier) == 1 else "mixed"
        for tier, chunks in chunks_by_tier.items():
            observer.count(f"restore.tokens_{tier}", chunks * CHUNK_TOKENS)
            observer.count(f"restore.bytes_{tier}", chunks * chunk_bytes)
        observer.observe(f"restore.seconds_{source}", restore.seconds)
        observer.observe("restore.queue_seconds", job.queued_s)
        observer.observe("restore.read_seconds", job.waited_s)
        observer.observe("restore.project_seconds", job.written_s)
        if job.seconds > 0:
            gb_per_s = len(job.sources) * chunk_bytes / job.seconds / 1e9
            observer.observe(f"restore.gb_per_s_{source}", gb_per_s)
        if restore.num_recompute:
            observer.observe("restore.recompute_seconds", restore.computed_s)
        if restore.decision is not None:
            ratio = restore.seconds / restore.decision.job_s
            observer.observe(f"restore.prediction_ratio_{source}", ratio)
