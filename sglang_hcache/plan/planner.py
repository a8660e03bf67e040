"""Plans: the method of every layer, and how long the restore takes.

A plan is chosen twice. When chunks are **saved**, :func:`plan_stored` decides what each layer stores (hidden states
or K and V); that stays. When a prefix is **restored**, :func:`fastest_restore` decides how many first layers
are recomputed from tokens instead, from the length, the tier and the load of the moment. :func:`search` decides both
at once, for one length: what is fastest, and the baselines.

``T = max(compute, I/O) + pipeline fill``, minimised exactly: a model has few layers, so all of
``recompute + hidden + kv = L`` are tried ([HCache §4.1], without the fill; ``docs/planner.md``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hcache.core.layout import Method, PlanKind
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.plan.timeline import FloatArray, IntArray, Timeline, best_timeline, block_totals

_TIE = 1e-9
"""Plans whose times differ by less than this share are equally fast."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """How many layers come back by which method."""

    recompute: int
    hidden: int
    kv: int

    @property
    def num_layers(self) -> int:
        return self.recompute + self.hidden + self.kv

    @classmethod
    def of(cls, methods: Sequence[Method]) -> Split:
        """Count ``methods``, one a layer."""
        return cls(
            recompute=sum(method is Method.RECOMPUTE for method in methods),
            hidden=sum(method is Method.HIDDEN for method in methods),
            kv=sum(method is Method.KV for method in methods),
        )

    def methods(self) -> tuple[Method, ...]:
        """One a layer: recomputed layers first (they need the tokens), then K and V, then hidden states.

        K and V before hidden states, so that a restore that recomputes a few more layers than were planned for
        spares the larger reads first.
        """
        return (Method.RECOMPUTE,) * self.recompute + (Method.KV,) * self.kv + (Method.HIDDEN,) * self.hidden

    def mixes_only(self, allowed: Collection[Method]) -> bool:
        """Whether no layer has a method that is not allowed."""
        counts = {Method.RECOMPUTE: self.recompute, Method.HIDDEN: self.hidden, Method.KV: self.kv}
        return all(method in allowed or not count for method, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a prefix comes back, and when everything of it is there."""

    methods: tuple[Method, ...]
    """Each layer's method."""
    timeline: Timeline
    """Predicted, step by step; its steps are in the order in which layers are read and computed."""

    @property
    def split(self) -> Split:
        return Split.of(self.methods)

    @property
    def total_s(self) -> float:
        """Predicted seconds from the first read to the last layer."""
        return self.timeline.total_s


def make_plan(methods: Sequence[Method], costs: LayerCosts) -> Plan:
    """A given method for every layer, with its times.

    Raises:
        ValueError: as :func:`sglang_hcache.plan.timeline.simulate`.
    """
    return Plan(methods=tuple(methods), timeline=best_timeline(methods, costs))


def search(
    costs: LayerCosts,
    num_layers: int,
    kind: PlanKind = PlanKind.AUTO,
    *,
    with_fill: bool = True,
) -> Plan:
    """The fastest plan of ``kind``, found by trying all of them.

    Of equally fast ones it is the one with the least computation, then the least I/O: others want the device, too.

    Args:
        costs: seconds of one layer, for one length.
        num_layers: layers of the model, at least 1.
        kind: which methods may be mixed.
        with_fill: False leaves the pipeline's fill out of what is minimised, as [HCache §4.1.2] does. The plan's
            own times always have it.

    Raises:
        ValueError: ``num_layers`` below 1.
    """
    if num_layers < 1:
        raise ValueError(f"a model has at least one layer, got {num_layers}")
    splits = [split for split in _all_splits(num_layers) if split.mixes_only(kind.methods)]
    recompute, hidden, kv = _counts(splits)
    total, io, compute = block_totals(recompute, hidden, kv, costs)
    if not with_fill:
        total = np.maximum(io, compute)
    best = splits[_first_of_fastest(total, compute, io)]
    return make_plan(best.methods(), costs)


def plan_stored(costs: LayerCosts, num_layers: int, kind: PlanKind = PlanKind.AUTO) -> tuple[Method, ...]:
    """What each layer stores, decided once, when chunks are saved.

    Every layer stores something, also one that a restore of this length would recompute, so that longer ones need not:
    recomputing grows with the square of the length, and long contexts are best restored without it [HCache §6.2.3].
    What the fastest plan does not read of these layers is chosen for restores that recompute none.

    Args:
        costs: seconds of one layer, for the length to be good at.
        num_layers: layers of the model.
        kind: which methods restores may mix later.

    Returns:
        ``HIDDEN`` or ``KV`` for each layer; ``RECOMPUTE`` for all of them if nothing is to be stored.
    """
    if kind is not PlanKind.AUTO:
        return (kind.methods[0],) * num_layers
    choices = [Split(0, num_layers - num_kv, num_kv).methods() for num_kv in range(num_layers + 1)]
    fastest = []
    for stored in choices:
        totals, _, _ = block_totals(*_after_recomputing(stored, range(num_layers + 1)), costs)
        fastest.append((float(totals.min()), float(totals[0])))
    times = np.array(fastest)
    _, io, _ = block_totals(*_counts([Split.of(stored) for stored in choices]), costs)
    return choices[_first_of_fastest(times[:, 0], times[:, 1], io)]


@dataclass(frozen=True, slots=True)
class RestoreTimes:
    """A restore in numbers, without its timeline. Seconds."""

    num_recompute: int
    """First layers that are recomputed."""
    total_s: float
    io_s: float
    compute_s: float


def fastest_restore(
    stored: Sequence[Method],
    costs: LayerCosts,
    *,
    num_blocks: int = 1,
    max_recompute: int | None = None,
    least_gain: float = 1.0,
) -> RestoreTimes:
    """The fastest way to bring back what was stored: how many first layers to recompute instead, if any.

    Quick: the serving thread asks.

    Args:
        stored: what each layer stores, ``HIDDEN`` or ``KV``.
        costs: seconds of one layer, all tokens together: their number, the tiers they are in, the load.
        num_blocks: parts that the tokens are read in, one after the other: the more, the less the first read and the
            last computation, which nothing hides, count.
        max_recompute: most layers to recompute; None: all.
        least_gain: no layer is recomputed unless that is more than so many times as fast.

    Raises:
        ValueError: no layers, or ``num_blocks`` or ``least_gain`` below 1.
    """
    if not stored or num_blocks < 1 or not least_gain >= 1:
        raise ValueError(f"got {len(stored)} layers in {num_blocks} blocks, least gain {least_gain!r}")
    most = len(stored) if max_recompute is None else min(max_recompute, len(stored))
    recompute, hidden, kv = _after_recomputing(stored, range(most + 1))
    of_block = costs.scaled(io=1 / num_blocks, compute=1 / num_blocks)
    total, io, compute = block_totals(num_blocks * recompute, num_blocks * hidden, num_blocks * kv, of_block)
    best = _first_of_fastest(total, compute, io)
    if total[0] <= least_gain * total[best]:
        best = 0
    return RestoreTimes(best, float(total[best]), float(io[best]), float(compute[best]))


def closed_form(costs: LayerCosts, num_layers: int) -> Split:
    """[HCache §4.1.2]: balance computation and I/O with one method besides hidden states.

    If projecting is slower than reading (C_H > IO_H), the other layers are read as K and V, which cost no
    computation: ``L_H·C_H = L_H·IO_H + L_O·IO_KV``. Otherwise they are recomputed, which costs no I/O:
    ``L_H·IO_H = L_H·C_H + L_O·C_token``. With ``L_H + L_O = L``::

        C_H > IO_H:   L_H = ceil(L·IO_KV   / (IO_KV + C_H - IO_H))
        C_H <= IO_H:  L_H = ceil(L·C_token / (C_token + IO_H - C_H))

    There is no pipeline fill in it, writing K and V is free, and it assumes that K and V are larger than hidden states
    and recomputing slower than projecting. :func:`search` assumes none of it.

    Raises:
        ValueError: ``num_layers`` below 1, or costs outside these assumptions.
    """
    if num_layers < 1:
        raise ValueError(f"a model has at least one layer, got {num_layers}")
    if costs.io_kv_s <= costs.io_hidden_s or costs.compute_recompute_s <= costs.compute_hidden_s:
        raise ValueError("K and V must be slower to read than hidden states, and recomputing than projecting")
    gap_s = costs.compute_hidden_s - costs.io_hidden_s
    other_s = costs.io_kv_s if gap_s > 0 else costs.compute_recompute_s
    # Rounding must not make 32.000000001 of an exact 32.
    hidden = min(num_layers, math.ceil(num_layers * other_s / (other_s + abs(gap_s)) - _TIE))
    rest = num_layers - hidden
    return Split(0, hidden, rest) if gap_s > 0 else Split(rest, hidden, 0)


def stored_bytes(shape: ModelShape, stored: Sequence[Method]) -> int:
    """Bytes that one token takes in a tier, all layers together."""
    split = Split.of(stored)
    return split.hidden * shape.hidden_row_bytes + split.kv * shape.kv_row_bytes


def _all_splits(num_layers: int) -> list[Split]:
    return [
        Split(recompute, num_layers - recompute - kv, kv)
        for recompute in range(num_layers + 1)
        for kv in range(num_layers - recompute + 1)
    ]


def _counts(splits: Sequence[Split]) -> tuple[IntArray, IntArray, IntArray]:
    """(recompute, hidden, kv) of each split."""
    table = np.array([(split.recompute, split.hidden, split.kv) for split in splits], dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2]


def _after_recomputing(stored: Sequence[Method], choices: range) -> tuple[IntArray, IntArray, IntArray]:
    """(recompute, hidden, kv) left of ``stored`` for each number of recomputed first layers in ``choices``."""
    counts = np.array(choices, dtype=np.int64)
    hidden = np.array([method is Method.HIDDEN for method in stored] + [False], dtype=np.int64)
    kv = np.array([method is Method.KV for method in stored] + [False], dtype=np.int64)
    return counts, hidden[::-1].cumsum()[::-1][counts], kv[::-1].cumsum()[::-1][counts]


def _first_of_fastest(total: FloatArray, second: FloatArray, third: FloatArray) -> int:
    """The place of the smallest total; of those as good as equal, of the smallest ``second``, then ``third``."""
    fastest = np.flatnonzero(total <= total.min() * (1 + _TIE))
    return int(min(fastest, key=lambda place: (second[place], third[place])))
