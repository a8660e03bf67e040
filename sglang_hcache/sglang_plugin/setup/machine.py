"""What the numbers of a profile belong to, beside the sizes of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from sglang_hcache.plan.shapes import printable
from sglang_hcache.sglang_plugin.seam.model import ServedModel


def machine_name(device: str, computes_by: str, directories: Sequence[os.PathLike[str]]) -> str:
    """Processor, device, with what it computes, and directories of the disk tier: a text that a profile may hold.

    Args:
        computes_by: as :func:`computes_by` returns it.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = os.uname().machine
    cores = len(os.sched_getaffinity(0))
    where = ", ".join(sorted(os.fspath(path) for path in directories)) or "no disk tier"
    return printable(f"{model}, {cores} cores, {device}, {computes_by}; {where}")


def computes_by(model: ServedModel, attention_backend: str, *, is_cpu: bool) -> str:
    """Threads of a CPU, dtype, attention backend, how weights are quantised, and ranks.

    Of two dtypes of as many bytes, a CPU may compute products of one several times as fast.
    """
    num_ranks = model.ranks.size
    parts = (
        f"{torch.get_num_threads()} threads" if is_cpu else None,
        str(model.dtype).removeprefix("torch."),
        attention_backend,
        model.quantization,
        f"{num_ranks} ranks" if num_ranks > 1 else None,
    )
    return ", ".join(filter(None, parts))
