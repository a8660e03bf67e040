"""What a served model is known by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.device.attention import Attention
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


class Attends(nn.Module):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class AttendsToX(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_layers_are_watched_where_their_input_is_known() -> None:
    modules = [Attends(), AttendsToX(), Attends()]
    attention = tuple(Attention(module, "attn", heads=1, kv_heads=1, head_dim=8) for module in modules)
    seen: list[tuple[int, float]] = []
    replace(model(Layer()), attention=attention).watch(
        range(3), lambda layer, hidden: seen.append((layer, float(hidden)))
    )
    modules[0](torch.tensor(0), torch.tensor(1.0))
    modules[1](torch.tensor(2.0))
    modules[2](torch.tensor(0), hidden_states=torch.tensor(3.0))
    assert seen == [(0, 1.0), (2, 3.0)]


class RadixAttention(nn.Module):
    """What is read of SGLang's class of this name."""

    layer_id = 0

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.k_scale_float = self.v_scale_float = scale


def test_rounded_kv_is_served_only_where_it_is_rounded_alike() -> None:
    def namespace(kv_dtype: torch.dtype, scale: float = 1.0) -> bytes:
        served = replace(model(RadixAttention(scale)), dtype=torch.bfloat16, kv_dtype=kv_dtype)
        return served.namespace(StateLayout.of((Method.KV,), 8, 8), bytes(32)).namespace_id()

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert len({namespace(torch.bfloat16), namespace(e4m3), namespace(e5m2), namespace(e4m3, 2.0)}) == 4
    assert namespace(torch.bfloat16) == namespace(torch.bfloat16, 2.0), "nothing is scaled there"
