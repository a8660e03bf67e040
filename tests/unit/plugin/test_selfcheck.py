"""What the self-check takes for rounding, and what not. Servers show that it finds projectors (test_attention.py)."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_hcache.sglang_plugin.selfcheck import _relative, tolerance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=DTYPES, ids=str)
def key(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(96, 8, 64, generator=torch.Generator().manual_seed(0)).to(request.param)


def test_rounding_is_allowed(key: torch.Tensor) -> None:
    exact, turned = key.double(), key
    for angle in (1.0, -1.0):  # rounded at every step
        cosine, sine = math.cos(angle), math.sin(angle)
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
    assert 0 < _relative(turned, exact) <= tolerance(key.dtype)


@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_key_of_a_slightly_wrong_size_is_not(key: torch.Tensor, factor: float) -> None:
    assert _relative(key * factor, key) > tolerance(key.dtype)


def test_one_wrong_value_is_not(key: torch.Tensor) -> None:
    wrong = key.clone()
    wrong[50, 3, 20] += 1
    assert _relative(wrong, key) > tolerance(key.dtype)


def test_what_is_no_number_is_the_worst(key: torch.Tensor) -> None:
    wrong = key.clone()
    wrong[0, 0, 0] = math.nan
    assert math.isnan(_relative(wrong, key))
