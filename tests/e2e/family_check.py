"""A program: families' real SGLang models, each in a fork of this process, which imports SGLang once.

Usage: ``family_check.py DTYPE NAME=MODEL_FOLDER …``, in the environment of ``prepare_launch``. Prints a line of JSON
for each: what the self-check at start finds, how far K and V restored by each projector are from the model's own over a
longer prompt, and how the self-check refuses damaged projectors.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.registry import ModelRegistry

from restoring.rig import Rig
from sglang_hcache.core.errors import SelfCheckError
from sglang_hcache.core.layout import Method
from sglang_hcache.device.attention import AttentionForm
from sglang_hcache.device.projector import DescribedProjector, Projector
from sglang_hcache.device.triton_rows import TritonRows
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.sglang_plugin.setup import selfcheck

LENGTH, PIECE, TAIL = 320, 128, 64
FUSED = 5
"""Tokens that go through the GPU's kernel, each in a program of its own, in Triton's interpreter: 10 ms a layer."""
BOTH = (Method.HIDDEN, Method.KV)


def check_family(folder: Path, dtype: str) -> dict[str, Any]:
    rig = Rig.load(folder, LENGTH, PIECE, "--dtype", dtype)
    found = _self_check(rig, dict(rig.model.projectors()), BOTH)
    shape = rig.model.shape
    return {
        "architecture": rig.model.architecture,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "hidden_bytes": shape.num_layers * shape.hidden_row_bytes,
        "kv_bytes": shape.num_layers * shape.kv_row_bytes,
        "projector": found.projector,
        "why_not_hidden": found.why_not_hidden,
        "may_recompute": found.may_recompute,
        "tolerance": found.tolerance,
        "restored_tokens": LENGTH - TAIL,
        "self_check": {str(method): worst.error for method, worst in found.errors.items()},
        "restored": {name: _restored(rig, each) for name, each in rig.model.projectors()},
        "fused": _fused(rig),
        "continued": _continued(rig, found),
        "without_projector": _without_projector(rig),
        "mutants": {name: _refusal(rig, each) for name, each in _mutants(rig)},
    }


def _self_check(
    rig: Rig, projectors: dict[str, Projector], methods: tuple[Method, ...]
) -> selfcheck.SelfCheckResult:
    return selfcheck.run(rig.model, rig.restorer, projectors, rig.device, methods)


@torch.inference_mode()
def _restored(rig: Rig, projector: Projector) -> float | str:
    """Largest difference over the whole prompt, which was computed in pieces and is restored in one."""
    slots = rig.view.allocate(LENGTH)
    try:
        _restore(rig, projector, Method.HIDDEN, slots, LENGTH)
        return rig.error(slots)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        rig.view.free(slots)


@torch.inference_mode()
def _fused(rig: Rig) -> dict[str, Any] | None:
    """What the GPU's kernel writes, beside what the model's own modules do; None: its attention is not described."""
    projector = next(iter(dict(rig.model.projectors()).values()))
    if not isinstance(projector, DescribedProjector):
        return None
    dtype, pool, heads = rig.model.dtype, rig.device.pool, rig.model.shape.num_kv_heads
    steps = [projector.key_steps(layer, dtype, with_norm=True) for layer in range(rig.num_layers)]
    found: dict[str, Any] = {"layers": sum(each is not None for each in steps), "norms": 0, "error": 0.0}
    slots = [rig.view.allocate(FUSED) for _ in range(2)]
    positions = torch.arange(LENGTH - FUSED, LENGTH)
    for layer, step in enumerate(steps):
        found["norms"] += step is not None and step.norm is not None
        rows = StoredRows.of(layer, Method.HIDDEN, rig.hidden[layer][positions])
        for writer, into in zip((TritonRows(), None), slots, strict=True):
            LayerRestorer(dtype, pool, heads, projector, writer).restore([rows], positions, into)
        for mine, true in zip(*(pool.read(layer, into) for into in slots), strict=True):
            found["error"] = max(found["error"], float((mine - true).abs().max() / true.abs().max()))
    for each in slots:
        rig.view.free(each)
    return found


@torch.inference_mode()
def _continued(rig: Rig, found: selfcheck.SelfCheckResult) -> dict[str, float]:
    """What the model computes behind a restored prefix, by method: the largest difference of K or V."""
    differences = {}
    restored = LENGTH - TAIL
    for method in (*found.errors, *((Method.RECOMPUTE,) if found.may_recompute else ())):
        slots = rig.view.allocate(LENGTH)
        rest = rig.num_layers - 1 if method is Method.RECOMPUTE else 0
        if rest:
            for start in range(0, restored, PIECE):
                end = min(start + PIECE, restored)
                rig.device.forward.extend(rig.tokens[:end], slots[:end], start, rest)
        _restore(
            rig, found.restorer.projector, Method.KV if rest else method, slots, restored, first_layer=rest
        )
        rig.device.forward.extend(rig.tokens, slots, restored, rig.num_layers)
        differences[str(method)] = rig.error(slots)
        rig.view.free(slots)
    return differences


def _restore(
    rig: Rig,
    projector: Projector | None,
    method: Method,
    slots: torch.Tensor,
    length: int,
    first_layer: int = 0,
) -> None:
    restorer = rig.restorer if projector is None else replace(rig.restorer, projector=projector)
    for layer in range(first_layer, rig.num_layers):
        rows = rig.stored_rows(layer, method)[:length].contiguous()
        restorer.restore([StoredRows.of(layer, method, rows)], torch.arange(length), slots[:length])


# -- mutants -------------------------------------------------------------------------------------


def _refusal(rig: Rig, mutant: Projector) -> str | None:
    """Why nothing is served with it; None: the self-check takes it."""
    try:
        _self_check(rig, {"mutant": mutant}, (Method.HIDDEN,))
    except SelfCheckError as error:
        return str(error)
    return None


def _without_projector(rig: Rig) -> str | None:
    """Why hidden states are not used where no projector is right; K and V are."""
    _, projector = next(rig.model.projectors())
    found = _self_check(rig, {"mutant": _Mutant(projector, scale=1.001)}, BOTH)
    assert found.restorer.projector is None
    assert set(found.errors) == {Method.KV}
    return found.why_not_hidden


def _mutants(rig: Rig) -> Iterator[tuple[str, Projector]]:
    """Projectors that are wrong in one thing that this family does; in each layer alone, so also in the last."""
    for name, projector in rig.model.projectors():
        if isinstance(projector, DescribedProjector):
            for damage, forms in _damaged(projector.forms):
                yield damage, DescribedProjector(forms)
        yield f"wrong position ({name})", _Mutant(projector, shift=1)
        yield f"wrong position far away ({name})", _Mutant(projector, shift=1, far=LENGTH)
        yield f"K too large ({name})", _Mutant(projector, scale=1.001)
        yield f"K of the pass ({name})", _Mutant(projector, scale=1.5, beyond=LENGTH)
        yield f"K of a short pass ({name})", _Mutant(projector, scale=1.5, beyond=LENGTH, in_short=True)


def _damaged(forms: tuple[AttentionForm, ...]) -> Iterator[tuple[str, list[AttentionForm]]]:
    *others, last = forms
    if last.has_bias:
        yield "missing bias", [*others, replace(last, has_bias=False)]
    if last.key_norm is not None:
        yield "missing norm", [*others, replace(last, key_norm=None)]
    if last.clip is not None:
        yield "missing clip", [*others, replace(last, clip=None)]
    if last.rotary is not None:
        yield "missing rotation", [*others, replace(last, rotary=None)]
        yield "wrong rotary base", [*others, replace(last, rotary=_OtherBase(last.rotary))]
    if last.kv_heads > 1:
        yield "heads in another order", [*others, replace(last, projection=_Swapped(last))]


class _OtherBase(torch.nn.Module):
    """The rotation with the angles of another base."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary
        self.head_size = rotary.head_size
        steps = torch.arange(0, rotary.rotary_dim, 2).float() / rotary.rotary_dim
        angles = torch.outer(torch.arange(len(rotary.cos_sin_cache)).float(), 20000.0**-steps)
        self._table = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _replaced(self._rotary, self._table.to(self._rotary.cos_sin_cache.dtype)):
            rotated: tuple[torch.Tensor, torch.Tensor] = self._rotary(positions, query, key)
        return rotated


@contextmanager
def _replaced(rotary: Any, table: torch.Tensor) -> Iterator[None]:
    true = rotary.cos_sin_cache
    rotary.cos_sin_cache = table
    try:
        yield
    finally:
        rotary.cos_sin_cache = true


class _Swapped(torch.nn.Module):
    """The projection with the rows of K's first two heads exchanged."""

    def __init__(self, form: AttentionForm) -> None:
        super().__init__()
        order = torch.arange(form.projection.weight.shape[0])
        first = slice(form.q_size, form.q_size + form.head_dim)
        second = slice(first.stop, first.stop + form.head_dim)
        order[first], order[second] = order[second].clone(), order[first].clone()
        self.weight = torch.nn.Parameter(form.projection.weight.detach()[order], requires_grad=False)
        self.bias = getattr(form.projection, "bias", None)


class _Mutant:
    """A projector that is wrong in one thing.

    Args:
        shift: every token is taken for the one so many positions after it. Right for a model whose K does not depend
            on positions.
        far: not so before this position.
        scale: of K.
        beyond: K is scaled where the pass has a token beyond this position, then that of all: right for prompts that
            are short. So do some rotations.
        in_short: it is scaled in all other passes.
    """

    def __init__(
        self,
        projector: Projector,
        *,
        shift: int = 0,
        far: int = 0,
        scale: float = 1.0,
        beyond: int = -1,
        in_short: bool = False,
    ) -> None:
        self._projector = projector
        self._shift = shift
        self._far = far
        self._scale = scale
        self._beyond = beyond
        self._in_short = in_short

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self._projector.project(
            layer, hidden, positions + self._shift * (positions >= self._far)
        )
        is_long = int(positions.max()) > self._beyond
        return key * (1.0 if is_long == self._in_short else self._scale), value


# -- processes -----------------------------------------------------------------------------------


def _report(name: str, folder: Path, dtype: str, into: Any) -> None:
    try:
        result = check_family(folder, dtype)
    except Exception:
        result = {"failed": traceback.format_exc()}
    into.put(json.dumps({"family": name, **result}))


def main(arguments: list[str]) -> None:
    logging.getLogger("sglang_hcache").setLevel(logging.WARNING)
    assert ModelRegistry.models, "importing all models here spares every fork of it"
    fork = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # a fork of a process that has OpenMP's threads waits for them forever
    dtype, *models = arguments
    for argument in models:
        name, _, folder = argument.partition("=")
        results = fork.SimpleQueue()
        process = fork.Process(target=_report, args=(name, Path(folder), dtype, results))
        process.start()
        process.join()
        text = results.get() if not results.empty() else json.dumps({"family": name, "failed": "it died"})
        print(f"RESULT {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
