"""What is measured before serving, however short the time for it."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_hcache.sglang_plugin.measuring import Bench

LAYERS = 2


class Forward:
    """Takes time as attention does, and remembers what it was asked to compute."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def allocate(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    def release(self, slots: torch.Tensor) -> None:
        pass

    def extend(self, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> None:
        assert (len(slots), num_layers) == (len(tokens), LAYERS)
        self.pieces.append((len(tokens) - start, start))
        time.sleep(1e-9 * (len(tokens) ** 2 - start**2))


def bench(forward: Forward, longest: int, budget_s: float, context: int = 10_000) -> Bench:
    shape = SimpleNamespace(num_layers=LAYERS)
    model = SimpleNamespace(vocabulary=100, context_length=context, shape=shape)
    return Bench(model, None, forward, None, longest, budget_s, 1, "here")  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [256, 512, 1024, 8192])
@pytest.mark.parametrize("budget_s", [1e-6, 0.2])
def test_a_piece_behind_a_prefix_is_measured_in_any_case(longest: int, budget_s: float) -> None:
    forward = Forward()
    curve = bench(forward, longest, budget_s)._recompute_curve()
    expected = [] if 1.25 * longest > 10_000 else [(longest // 4, longest)]
    assert [piece for piece in dict.fromkeys(forward.pieces) if piece[1]] == expected
    assert {(64, 0), (128, 0), (256, 0)} <= set(forward.pieces)
    assert curve.seconds(longest, longest) > 0


def test_no_longer_than_the_model_allows() -> None:
    forward = Forward()
    bench(forward, 512, 1e-6, context=512)._recompute_curve()
    assert max(length + start for length, start in forward.pieces) <= 512
