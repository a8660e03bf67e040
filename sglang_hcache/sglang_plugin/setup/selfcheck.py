"""Before serving: is what a restore writes into the KV pool what the model itself wrote there?"""

from __future__ import annotations

import logging
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from sglang_hcache.core.errors import SelfCheckError
from sglang_hcache.core.layout import Method
from sglang_hcache.device.projector import Projector
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.seam.protocols import Device
from sglang_hcache.sglang_plugin.setup.scratch import take_slots

logger = logging.getLogger(__name__)

_TOKENS = 40
_ALONE = 8
"""Rows that are projected with and without another one beside them."""
_ULPS = 8  # rounding that a different shape of the same matrix product may cause in one value
_OFTEN = 4
"""In all values together it causes a so many-th of that: K that is 5 % too large shows in bfloat16 too."""
_FLOAT32_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Worst:
    """Largest difference of K or V in any layer: see ``_relative``."""

    error: float
    layer: int


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """What was found to be right."""

    errors: Mapping[Method, Worst]
    """Those of the methods that may be used."""
    tolerance: float
    restorer: LayerRestorer
    """With the projector that is right; without one where hidden states may not be used."""
    projector: str | None
    """Its name."""
    why_not_hidden: str | None
    """Why hidden states may not be used, though they were asked for among others."""
    may_recompute: bool
    """Whether the first layers can be run by themselves."""

    @property
    def error(self) -> float:
        """The largest of all methods."""
        return max(worst.error for worst in self.errors.values())


def run(
    model: ServedModel,
    restorer: LayerRestorer,
    projectors: Mapping[str, Projector],
    device: Device,
    methods: Sequence[Method],
) -> SelfCheckResult:
    """Run a short prompt, restore it by each of ``methods`` into other slots, and compare both in the KV pool.

    Args:
        restorer: its projector does not matter.
        projectors: name -> one that may be right, in the order in which they are tried.

    Raises:
        SelfCheckError: K and V are not what they should be; or hidden states are not, and nothing else was asked for.
    """
    with _Check(model, device, watch=Method.HIDDEN in methods and bool(projectors)) as check:
        errors: dict[Method, Worst] = {}
        if Method.KV in methods:
            errors[Method.KV] = check.worst(restorer, Method.KV)
            if errors[Method.KV].error > check.tolerance:
                raise SelfCheckError(check.refusal(Method.KV, check.complaint(errors[Method.KV])))
        name, why_not = None, None
        if Method.HIDDEN in methods:
            restorers = {name: replace(restorer, projector=each) for name, each in projectors.items()}
            name, why_not = check.choose(restorers, errors)
            if name is None and Method.KV not in methods:
                raise SelfCheckError(check.refusal(Method.HIDDEN, why_not or ""))
        return SelfCheckResult(
            errors=errors,
            tolerance=check.tolerance,
            restorer=replace(restorer, projector=None) if name is None else restorers[name],
            projector=name,
            why_not_hidden=why_not,
            may_recompute=Method.KV in methods and model.may_run_first_layers and check.can_recompute(),
        )


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype is torch.float32 else _ULPS * torch.finfo(dtype).eps


class _Check:
    """A prompt that the model computed, and slots in which it is restored. A context manager: the slots are lent.

    Args:
        watch: whether to keep its hidden states.
    """

    def __init__(self, model: ServedModel, device: Device, *, watch: bool) -> None:
        self.tolerance = tolerance(model.dtype)
        self._model = model
        self._pool = device.pool
        self._tree, self._forward = device.tree, device.forward
        self._host_memory = device.host_memory
        self._layers = range(model.shape.num_layers)
        self._count = min(_TOKENS, model.context_length)
        self._tokens = array("q", random.Random(0).choices(range(model.vocabulary), k=self._count))
        # All over the context: some rotations differ from others only far from its beginning.
        self._positions = torch.linspace(0, model.context_length - 1, self._count, dtype=torch.float64).long()
        self._hidden: dict[int, torch.Tensor] = {}
        self._slots = take_slots(self._tree, self._count)
        handles = model.watch(self._layers if watch else (), self._keep)
        try:
            self._run(self._slots, len(self._layers))
        finally:
            for handle in handles:
                handle.remove()
        self._others = take_slots(self._tree, self._count)
        # As in a restore: on a thread that the model does not run on.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hcache-check")

    def __enter__(self) -> _Check:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        # Attention may read whole pages and mask what is of nobody: a NaN outlives a product with 0.
        self._blank(self._layers, 0.0)
        self._tree.free(self._slots)
        self._tree.free(self._others)

    def _run(self, slots: torch.Tensor, num_layers: int) -> None:
        self._forward.extend(self._tokens, slots[: self._count], 0, num_layers, self._positions)

    def _keep(self, layer: int, rows: torch.Tensor) -> None:
        self._hidden[layer] = rows[: self._count].clone()

    def worst(self, restorer: LayerRestorer, method: Method) -> Worst:
        """The largest difference of what ``restorer`` writes, all layers at once."""
        stored = [self._in_host_memory(layer, method, rows) for layer, rows in self._stored(method)]
        if len(stored) != len(self._layers):
            return Worst(math.inf, 0)
        self._thread.submit(self._restore, restorer, stored).result()
        found = (Worst(_as_rank(self._difference(layer)), layer) for layer in self._layers)
        return max(found, key=lambda each: each.error)

    def choose(
        self, restorers: Mapping[str, LayerRestorer], errors: dict[Method, Worst]
    ) -> tuple[str | None, str | None]:
        """The first one that is right with hidden states, whose error is noted; or None, and why the first is not."""
        complaints = []
        for name, restorer in restorers.items():
            complaint = self._shape_complaint() or self._complaint_of(restorer, errors)
            if complaint is None:
                return name, None
            logger.debug("hcache: projector %r: %s", name, complaint)
            complaints.append(complaint)
        return None, complaints[0] if complaints else "its attention modules are of an unknown make"

    def _complaint_of(self, restorer: LayerRestorer, errors: dict[Method, Worst]) -> str | None:
        try:
            worst = self.worst(restorer, Method.HIDDEN)
            if worst.error > self.tolerance:
                return self.complaint(worst)
            for layer in self._layers:
                self._thread.submit(self._check_rows_alone, restorer, layer).result()
        except Exception as error:  # whatever a foreign module does with what it does not expect
            return f"K and V cannot be projected: {type(error).__name__}: {error}"
        errors[Method.HIDDEN] = worst
        return None

    def _shape_complaint(self) -> str | None:
        """Whether what capture would store has the size that it is stored in."""
        for rows in self._hidden.values():
            if rows.dtype != self._model.dtype or rows.shape[1:] != (self._model.shape.hidden_size,):
                return f"hidden states are {rows.dtype} {tuple(rows.shape)}"
        return None

    def can_recompute(self) -> bool:
        """Whether the model runs its first layers by themselves, and writes what it writes in a whole pass."""
        count = len(self._layers) - 1
        if not count:
            return False
        try:
            self._blank(range(count))
            self._run(self._others, count)
        except Exception as error:
            logger.info("hcache: the first layers are not recomputed: %s: %s", type(error).__name__, error)
            return False
        error = max((self._difference(layer) for layer in range(count)), key=_as_rank)
        if _as_rank(error) > self.tolerance:
            logger.info("hcache: the first layers are not recomputed: K or V differ by %.3g", error)
            return False
        return True

    def complaint(self, worst: Worst) -> str:
        return (
            f"K or V differ from the model's own by {worst.error:.3g} in layer {worst.layer} "
            f"(allowed: {self.tolerance:.3g})"
        )

    def refusal(self, method: Method, why: str) -> str:
        other = "--hcache-method auto or kv does without hidden states; or serve"
        return (
            f"--hierarchical-cache hcache refuses to serve {self._model.architecture} with the method {method}: {why}. "
            f"{other if method is Method.HIDDEN else 'Serve'} with --hierarchical-cache off, and report this line."
        )

    def _stored(self, method: Method) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows that capture would store of each layer; none where the model did not show its hidden states."""
        for layer in self._layers:
            if method is Method.KV:
                parts = self._pool.read(layer, self._slots[: self._count])
                yield layer, torch.cat([part.view(self._model.row_dtype).flatten(1) for part in parts], dim=1)
            elif layer in self._hidden:
                yield layer, self._hidden[layer]

    def _in_host_memory(self, layer: int, method: Method, rows: torch.Tensor) -> StoredRows:
        """As a restore finds them, and not side by side: also what copies them to a GPU is checked."""
        count, half = len(rows), len(rows) // 2
        buffer = self._host_memory((count + 1) * rows.shape[1] * rows.element_size())
        memory = torch.from_numpy(buffer).view(rows.dtype).view(count + 1, -1)
        memory[:half], memory[half + 1 :] = rows[:half], rows[half:]
        spans = ((0, half), (half + 1, count - half))
        return StoredRows(layer, method, memory, tuple(span for span in spans if span[1]))

    @torch.inference_mode()
    def _restore(self, restorer: LayerRestorer, stored: Sequence[StoredRows]) -> None:
        self._blank(self._layers)
        positions = self._positions.to(self._others.device)
        restorer.restore(stored, positions, self._others[: self._count])

    @torch.inference_mode()
    def _check_rows_alone(self, restorer: LayerRestorer, layer: int) -> None:
        """``ValueError`` if K of a row depends on what is projected with it, a token at the end of the context here."""
        rows = self._hidden[layer][: _ALONE + 1]
        positions = torch.arange(_ALONE + 1, device=rows.device)
        positions[-1] = self._model.context_length - 1
        projector = restorer.projector
        assert projector is not None
        alone, _ = projector.project(layer, rows[:_ALONE], positions[:_ALONE])
        beside, _ = projector.project(layer, rows, positions)
        if _as_rank(_relative(beside[:_ALONE], alone)) > self.tolerance:
            raise ValueError(f"a token's K in layer {layer} depends on the other tokens of its pass")

    @torch.inference_mode()
    def _blank(self, layers: Iterable[int], value: float = math.nan) -> None:
        for layer in layers:
            nothing = torch.full_like(self._pool.read(layer, self._others)[0], value)
            self._pool.write(layer, self._others, nothing, nothing)

    def _difference(self, layer: int) -> float:
        mine, true = (self._pool.read(layer, slots[: self._count]) for slots in (self._others, self._slots))
        return max((_relative(one, other) for one, other in zip(mine, true, strict=True)), key=_as_rank)


def _relative(mine: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference as a share of the largest value, or the root mean squares of all, whichever is worse."""
    difference, true = mine.float() - true.float(), true.float()
    tiny = torch.finfo(torch.float32).tiny
    largest = difference.abs().max() / true.abs().max().clamp_min(tiny)
    typical = difference.square().mean().sqrt() / true.square().mean().sqrt().clamp_min(tiny)
    return max(float(largest), _OFTEN * float(typical), key=_as_rank)


def _as_rank(error: float) -> float:
    """A NaN is the worst of all, and must not be swallowed by ``max``."""
    return math.inf if math.isnan(error) else error
