"""Two resources, I/O and computation, step by step: when does a restore end, and who waits for whom?

Every layer is a step. A step is read (not if it is recomputed), then computed. Reads follow one another, and so do
computations, both in the same order of steps. That is a flow shop with two machines.

**Which order.** Layers that are recomputed must be the first ones of the model and stay in order; between the others
there is no dependence, for each is made from its own stored rows. So the order in time is free:

* Johnson's rule gives the shortest time (S. M. Johnson, "Optimal two- and three-stage production schedules with setup
  times included", 1954): first the steps whose reads are shorter than their computations, shortest read first; then
  the others, longest computation first. Recomputed layers read nothing and come first, K and V that need no
  computation come last.
* With memory for a few layers only, as a server has it, reads must not run ahead while layers are recomputed: steps of
  all methods are spread evenly, so that both resources always have something to do. Times are predicted as if there
  were memory for all.

**Where the two share cores** they hold each other up. Of the shorter one's work the longer hides only a part: all
times of a restore are stretched alike, so that ``max(I/O, computation) + contention * min(I/O, computation)`` is what
the two take together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import LayerCosts

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One layer's times, seconds after the restore began. A recomputed layer has an empty read."""

    layer: int
    method: Method
    read_start_s: float
    read_end_s: float
    compute_start_s: float
    compute_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when, in the order it happens."""

    steps: tuple[LayerTimes, ...]

    @property
    def total_s(self) -> float:
        """When the last layer is there."""
        return max(step.compute_end_s for step in self.steps)

    @property
    def io_s(self) -> float:
        """How long reads keep the tier busy."""
        return sum(step.read_end_s - step.read_start_s for step in self.steps)

    @property
    def compute_s(self) -> float:
        """How long computations keep the device busy."""
        return sum(step.compute_end_s - step.compute_start_s for step in self.steps)

    @property
    def fill_s(self) -> float:
        """The pipeline's fill: what is left of the time when the busier resource's work is taken out."""
        return self.total_s - max(self.io_s, self.compute_s)

    @property
    def io_idle_s(self) -> float:
        """How long the tier has nothing to do."""
        return self.total_s - self.io_s

    @property
    def compute_idle_s(self) -> float:
        """How long the device has nothing to do."""
        return self.total_s - self.compute_s


def simulate(methods: Sequence[Method], order: Sequence[int], costs: LayerCosts) -> Timeline:
    """Run the steps.

    Args:
        methods: each layer's method.
        order: the layers as they are read and computed, each once.
        costs: seconds of one layer.

    Raises:
        ValueError: no layers, ``order`` is not an order of the layers, or recomputed layers that are not the first
            ones, in order.
    """
    recomputed = [layer for layer in order if methods[layer] is Method.RECOMPUTE]
    if not methods or sorted(order) != list(range(len(methods))):
        raise ValueError(f"order must name each of {len(methods)} layers once")
    if recomputed != list(range(len(recomputed))):
        raise ValueError(f"recomputed layers must be the first ones, in order, got {recomputed}")
    longer = _stretch(
        sum(costs.io_s(method) for method in methods),
        sum(costs.compute_s(method) for method in methods),
        costs,
    )
    costs = costs.scaled(io=float(longer), compute=float(longer))
    read_free = compute_free = 0.0
    steps = []
    for layer in order:
        method = methods[layer]
        reads = method is not Method.RECOMPUTE
        read_start = read_free if reads else 0.0
        read_end = read_start + costs.io_s(method)
        compute_start = max(compute_free, read_end)
        compute_free = compute_start + costs.compute_s(method)
        if reads:
            read_free = read_end
        steps.append(
            LayerTimes(
                layer=layer,
                method=method,
                read_start_s=read_start,
                read_end_s=read_end,
                compute_start_s=compute_start,
                compute_end_s=compute_free,
            )
        )
    return Timeline(tuple(steps))


def _stretch(io_s: FloatArray | float, compute_s: FloatArray | float, costs: LayerCosts) -> FloatArray:
    """How many times as long everything takes because of ``costs.contention``, with so much to read and to compute."""
    longer, shorter = np.maximum(io_s, compute_s), np.minimum(io_s, compute_s)
    hidden: FloatArray = shorter / np.where(longer > 0, longer, 1.0)
    return 1 + costs.contention * hidden


def johnson_methods(costs: LayerCosts) -> tuple[Method, ...]:
    """The three methods by Johnson's rule: all steps of the first, then all of the second, then the third."""

    def rank(method: Method) -> tuple[int, float]:
        io, compute = costs.io_s(method), costs.compute_s(method)
        return (0, io) if io <= compute else (1, -compute)

    # Recomputing first on ties: its layers come first in the model, too. Their read takes no time, so rank 0.
    return tuple(sorted((Method.RECOMPUTE, Method.HIDDEN, Method.KV), key=rank))


def johnson_order(methods: Sequence[Method], costs: LayerCosts) -> tuple[int, ...]:
    """The layers in the order that takes the least time."""
    place = {method: index for index, method in enumerate(johnson_methods(costs))}
    return tuple(sorted(range(len(methods)), key=lambda layer: (place[methods[layer]], layer)))


def spread_order(methods: Sequence[Method], costs: LayerCosts) -> tuple[int, ...]:
    """The layers with the steps of each method spread evenly over the whole time.

    What Johnson's rule puts first begins each of its intervals, what it puts last ends them: the first recomputed layer
    is computed while the first rows are read, and nothing is computed after the last K and V.
    """
    place = {method: index for index, method in enumerate(johnson_methods(costs))}
    seen = dict.fromkeys(Method, 0)
    position = []
    for method in methods:
        position.append((seen[method] + place[method] / 2) / methods.count(method))
        seen[method] += 1
    return tuple(
        sorted(range(len(methods)), key=lambda layer: (position[layer], place[methods[layer]], layer))
    )


def best_timeline(methods: Sequence[Method], costs: LayerCosts) -> Timeline:
    """The steps in Johnson's order.

    Raises:
        ValueError: as :func:`simulate`.
    """
    return simulate(methods, johnson_order(methods, costs), costs)


def block_totals(
    num_recompute: IntArray, num_hidden: IntArray, num_kv: IntArray, costs: LayerCosts
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(total, I/O, computation) in seconds of many plans at once.

    In a flow shop with two machines the end is the longest way through: over all steps k, the reads up to k and the
    computations from k on. Within a block of equal steps that is linear in k, so its ends are enough. The total
    equals :attr:`Timeline.total_s` of :func:`best_timeline`. I/O and computation are without contention.

    Args:
        num_recompute, num_hidden, num_kv: layers of each method; arrays of one shape, which the results have.
    """
    counts = {
        Method.RECOMPUTE: num_recompute.astype(np.float64),
        Method.HIDDEN: num_hidden.astype(np.float64),
        Method.KV: num_kv.astype(np.float64),
    }
    io_before, io, compute = (np.zeros(num_hidden.shape) for _ in range(3))
    for method, count in counts.items():
        io += count * costs.io_s(method)
        compute += count * costs.compute_s(method)
    total, compute_after = np.maximum(io, compute), compute.copy()
    for method in johnson_methods(costs):
        count, io_step, compute_step = counts[method], costs.io_s(method), costs.compute_s(method)
        through_first = io_before + io_step + compute_after
        io_before += count * io_step
        compute_after -= count * compute_step
        through_last = io_before + compute_step + compute_after
        longest = np.maximum(total, np.maximum(through_first, through_last))
        total = np.where(count > 0, longest, total)
    return _stretch(io, compute, costs) * total, io, compute
