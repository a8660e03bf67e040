"""What the gate says of one restore: how it would be done, and what it and its alternative would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OVERHEAD_S = 0.002
"""Between the scheduler's decision and the first read, and between the last layer and admission."""

_PATIENCE = 1.5
"""A restore is abandoned after this many times the time that recomputing was predicted to take. Not right after that
time: most restores are nearly done then, and their work would be lost."""
_LEAST_PATIENCE_S = 0.25
"""Pauses of a busy machine must not end restores of a few milliseconds."""

_LEAST_TRY_S = 0.05
"""The same of one that is only tried, which nobody misses."""

COMPUTE, FIRST = "project", "recompute"
"""As ``core.metrics`` names a restore's phases."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a restore and its alternative would take, seconds, and how it would be done."""

    num_recompute: int
    """First layers that are recomputed."""
    layers: tuple[int, ...]
    """The others, in the order in which they are read."""
    work_s: float
    """The restore itself, from the first read to the last layer, by the costs alone."""
    delay_s: float
    """What restores took besides of late."""
    recompute_s: float
    """What computing the tokens takes: the whole of each pass that they fill, and for the rest of them what they add to
    the pass that the request needs anyway. Less if a part of them could be restored sooner than all."""
    first_layers_s: float
    """Part of the restore: a pass through its first layers."""
    others_s: float
    """Part of the restore: the other layers, if the first ones do not hold them up."""
    io_s: float
    """Part of the restore: reading alone."""
    tier: str
    """The disk, if a part is there: what lies in host memory is restored from where it is, and nobody waits for it."""
    bottleneck: str
    """The tier whose reads take longest, or the work whose time decides."""
    others_bottleneck: str
    """The same of the other layers alone."""
    avoids_first_layers: bool
    """Whether layers would be recomputed if their factor were not above 1."""
    drift: Mapping[str, float]
    """By which the costs were multiplied."""
    is_try: bool
    """Whether it is to show how fast the tier is, though it would not pay."""

    @property
    def job_s(self) -> float:
        """From the first read to the last layer."""
        return self.work_s + self.delay_s

    @property
    def restore_s(self) -> float:
        """From the decision until the request can be admitted."""
        return self.job_s + OVERHEAD_S

    @property
    def waits_for_reads(self) -> bool:
        """Whether a tier decides how long it takes."""
        return self.bottleneck not in (COMPUTE, FIRST)

    def __str__(self) -> str:
        recomputed = f", first {self.num_recompute} layers recomputed" if self.num_recompute else ""
        return (
            f"{self.restore_s:.3f} s predicted{recomputed} ({self.bottleneck} decides), "
            f"{self.recompute_s:.3f} s without"
        )

    def pays(self, behind_s: float = 0.0) -> bool:
        """Whether to start it.

        Args:
            behind_s: seconds of other restores that come first, less seconds of other prefills that would come before
                its recomputation. Below 0 counts as 0: a restore that is slower than recomputing gains nothing.
        """
        return max(0.0, behind_s) + self.restore_s < self.recompute_s

    def deadline_s(self, backlog_s: float) -> float:
        """Seconds after which a restore that starts behind ``backlog_s`` of others is abandoned: one that is only
        tried, as soon as recomputing would have been over.
        """
        if self.is_try:
            return backlog_s + max(_LEAST_TRY_S, self.recompute_s)
        return backlog_s + max(_LEAST_PATIENCE_S, _PATIENCE * self.recompute_s)
