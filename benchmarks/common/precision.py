"""In what servers compute whose answers are compared."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE
from sglang_hcache.cli.tiny_model.model import TinyModel


@dataclass(frozen=True, slots=True)
class Precision:
    dtype: str
    """As ``--dtype`` takes it."""
    value_bytes: int
    logprob_tolerance: float
    """Largest difference of logprobs between equal answers."""


EXACT = Precision("float32", 4, LOGPROB_TOLERANCE)
FINEST_ON_GPU = Precision("float16", 2, 0.1)
"""SGLang's norms on a GPU take no float32. Simulated on a CPU, each operation off by up to a quarter of a unit in the
last place before it is rounded: with :func:`tame` weights, 12 layers and 1,536 values, logprobs of chosen tokens differ
by 0.01 (median), 0.05 (one in a hundred) and 0.07 at most; by 0.25 (median) with K of restored tokens 5 % too large.
With the usual weights rounding alone makes 0.06, 0.5 and 0.6."""
_TAME_AT = 128
"""Values of a hidden state at which the usual weights of random models are tame."""


def precision() -> Precision:
    """Of this machine's servers: the finer, the more surely different answers are wrong ones."""
    return FINEST_ON_GPU if has_gpu() else EXACT


def tame(hidden: int) -> float:
    """The ``initializer_range`` of random models on this machine: with wide ones' usual weights attention takes one
    token or another for the last bit of a half type.
    """
    usual = TinyModel().initializer_range
    return usual * min(1.0, (_TAME_AT / hidden) ** 0.5) if has_gpu() else usual
