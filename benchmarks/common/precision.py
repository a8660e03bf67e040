"""In what servers compute whose answers are compared."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hcache.cli.cpu_runtime import has_gpu
from sglang_hcache.cli.paired import LOGPROB_TOLERANCE


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str
    """As ``--dtype`` takes it."""
    value_bytes: int
    logprob_tolerance: float
    """Largest difference of logprobs between equal answers."""


EXACT = Precision("float32", 4, LOGPROB_TOLERANCE)
FINEST_ON_GPU = Precision("float16", 2, 0.05)
"""SGLang's norms on a GPU take no float32. Random models with the same pieces differ by 0.005, with K of restored
tokens 5 % too large by 0.4 and more (bfloat16: 0.1 and 0.4); measured on a CPU."""


def precision() -> Precision:
    """Of this machine's servers: the finer, the more surely different answers are wrong ones."""
    return FINEST_ON_GPU if has_gpu() else EXACT
