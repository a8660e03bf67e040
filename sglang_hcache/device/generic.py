"""Hidden states to K and V for attention that nobody described: the model's own module, up to its attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sglang_hcache.device.attention import Attention, is_plain, kv_weights

_QKV_PROJECTION = "QKVParallelLinear"
"""SGLang's class for the matrix that makes Q, K and V."""
HIDDEN_STATES = "hidden_states"
_POSITIONS = ("positions", "position_ids")


class _HandedOver(Exception):  # noqa: N818 (no error)
    """K and V have arrived where attention would begin. Carries them."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key = key
        self.value = value


class _StandIn(nn.Module):
    """Takes the place of a module's child, and looks like it where it is only looked at."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not registered as a child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


class _HandOver(_StandIn):
    def forward(self, _query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _HandedOver(key, value)


class _KeyValueRows(_StandIn):
    """The projection, with zeros for the query."""

    q_size = 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight, bias = kv_weights(self.original, self.q_size)
        both = hidden.new_zeros(hidden.shape[0], self.q_size + weight.shape[0])
        both[:, self.q_size :] = nn.functional.linear(hidden, weight, bias)
        return both, None


class _KeyRotation(_StandIn):
    """The rotation, of as few heads of the query as it takes: one; on a GPU kernels may want a multiple of K's."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.original.head_size
        heads = 1 if key.device.type == "cpu" else key.shape[1:].numel() // size
        few = query[:, : heads if query.dim() > 2 else heads * size]
        _, key = self.original(positions, few.contiguous(), key, *more, **named)
        return query, key


class _Unchanged(_StandIn):
    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query


class GenericProjector:
    """Runs the model's own attention modules until they hand K and V over.

    It works on copies of the modules that share weights, buffers and children with them, but for the stand-ins: the
    model may run on another thread meanwhile.

    Args:
        layers: the attention of every layer, in order.
        drop_query: leave out the query's share of the projection, its norm and its rotation. That supposes that the
            projection's rows are those of Q, of K and of V, in this order.

    Raises:
        ValueError: a module does not take hidden states by this name.
    """

    def __init__(self, layers: Sequence[Attention], *, drop_query: bool) -> None:
        self._layers = tuple(layers)
        self._runners = [_runner(layer, drop_query=drop_query) for layer in layers]
        self._parameters = [list(inspect.signature(runner.forward).parameters) for runner in self._runners]
        for names in self._parameters:
            if HIDDEN_STATES not in names:
                raise ValueError(f"attention takes {', '.join(names)}, but nothing called {HIDDEN_STATES}")

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        named: dict[str, Any] = {HIDDEN_STATES: hidden, "forward_batch": None}
        named |= dict.fromkeys(_POSITIONS, positions)
        arguments = {name: named[name] for name in self._parameters[layer] if name in named}
        try:
            # Not called as a module: hooks on the original, which capture, must not see this.
            self._runners[layer].forward(**arguments)
        except _HandedOver as handed:
            attention = self._layers[layer]
            shape = (len(hidden), attention.kv_heads, attention.head_dim)
            return handed.key.reshape(shape), handed.value.reshape(shape)
        raise RuntimeError(f"the attention of layer {layer} handed over no K and V")


def _runner(attention: Attention, *, drop_query: bool) -> nn.Module:
    """A copy of the attention module that stops where attention would begin."""
    runner = copy.copy(attention.module)
    children = dict(attention.module.named_children())
    children[attention.core] = _HandOver(children[attention.core])
    if drop_query:
        for name, child in children.items():
            if type(child).__name__ == _QKV_PROJECTION and is_plain(child, attention.qkv_rows):
                children[name] = rows = _KeyValueRows(child)
                rows.__dict__["q_size"] = attention.q_size
        for name, stand_in in (("rotary_emb", _KeyRotation), ("q_norm", _Unchanged)):
            if name in children:
                children[name] = stand_in(children[name])
    runner.__dict__["_modules"] = children
    return runner
