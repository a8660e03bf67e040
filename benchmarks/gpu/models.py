"""One of SGLang's models in this process, with dummy weights: the self-check of a server's start, and restores."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.model_folder import write_model
from gpu.restores import Restores
from gpu.results import Report
from gpu.shapes import Shape
from restoring.rig import Rig
from sglang_hcache.core.errors import SelfCheckError
from sglang_hcache.core.layout import Method
from sglang_hcache.device.projector import Projector
from sglang_hcache.sglang_plugin.setup import selfcheck

TOKENS, PIECE, ROUNDS = 4096, 2048, 5
_ARGUMENTS = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--attention-backend", "triton"),
    *("--mem-fraction-static", "0.7", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"),
)


@dataclass
class _Shifted:
    """A projector that takes every token for the next one, or makes K a little too large."""

    projector: Projector
    shift: int = 0
    scale: float = 1.0

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.projector.project(layer, hidden, positions + self.shift)
        return key * self.scale, value


def measure(shape: Shape, report: Report) -> None:
    """The shape's model: what the self-check finds, whether it refuses mutants, and restores beside a prefill."""
    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as folder:
        write_model(Path(folder), shape)
        rig = Rig.load(Path(folder), TOKENS, PIECE, *_ARGUMENTS)
    with torch.inference_mode():
        found = selfcheck.run(
            rig.model,
            rig.restorer,
            dict(rig.model.projectors()),
            rig.device,
            (Method.HIDDEN, Method.KV),
        )
        report("self-check", _told(found) | {"mutants_taken": _mutants_taken(rig)})
        recompute_s = statistics.median(rig.recompute(TOKENS) for _ in range(ROUNDS))
        for method in (Method.HIDDEN, Method.KV):
            report(
                method.value, _restored(rig, found, method) | {"recompute_milliseconds": 1e3 * recompute_s}
            )


def _told(found: selfcheck.SelfCheckResult) -> dict[str, Any]:
    return {
        "ok": found.projector is not None,
        "projector": found.projector,
        "why_not_hidden": found.why_not_hidden,
        "may_recompute": found.may_recompute,
        "errors": {method.value: worst.error for method, worst in found.errors.items()},
        "tolerance": found.tolerance,
    }


def _mutants_taken(rig: Rig) -> list[str]:
    """Wrong projectors that the self-check takes for right."""
    name, projector = next(rig.model.projectors())
    mutants = {"K 5 % too large": _Shifted(projector, scale=1.05)}
    if "OPT" not in rig.model.architecture:  # its positions are in the hidden states
        mutants["next position"] = _Shifted(projector, shift=1)
    taken = []
    for mutant, each in mutants.items():
        try:
            selfcheck.run(
                rig.model,
                rig.restorer,
                {name: each},
                rig.device,
                (Method.HIDDEN,),
            )
        except SelfCheckError:
            continue
        taken.append(mutant)
    return taken


def _restored(rig: Rig, found: selfcheck.SelfCheckResult, method: Method) -> dict[str, Any]:
    if method not in found.errors:
        return {"ok": False, "why": found.why_not_hidden}
    rows = [rig.stored_rows(layer, method) for layer in range(rig.num_layers)]
    restores = Restores(method, rows, found.restorer, rig.device.host_memory)
    slots = rig.view.allocate(TOKENS)
    restores.run(slots)
    error = rig.error(slots)
    seconds = statistics.median(restores.run(slots) for _ in range(ROUNDS))
    restores.close()
    rig.view.free(slots)
    return {"ok": error <= found.tolerance, "error": error, "milliseconds": 1e3 * seconds}
