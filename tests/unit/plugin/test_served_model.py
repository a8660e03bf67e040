"""What a served model is known by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from sglang_hcache.sglang_plugin.model import ServedModel


class Layer(nn.Module):
    """Weights, a statistic that a checkpoint holds, and something worked out when it is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("cosines", torch.arange(8.0).cos(), persistent=False)


@contextmanager
def changed(tensor: torch.Tensor) -> Iterator[None]:
    """One bit of one value is another."""
    words = tensor.detach().view(torch.int32).view(-1)
    words[3] ^= 1
    yield
    words[3] ^= 1


def model(module: nn.Module) -> ServedModel:
    others: dict[str, Any] = dict.fromkeys((field.name for field in fields(ServedModel)), None)
    return ServedModel(**{**others, "module": module})


@pytest.mark.parametrize(
    ("name", "counts"), [("linear.weight", True), ("linear.bias", True), ("mean", True), ("cosines", False)]
)
def test_weights_are_what_a_checkpoint_holds(name: str, counts: bool) -> None:
    module = Layer()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = model(module).weights()
    with changed(tensors[name]):
        assert (model(module).weights() != before) == counts
    assert model(module).weights() == before == model(Layer()).weights()
