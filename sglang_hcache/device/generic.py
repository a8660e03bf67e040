"""Hidden states to K and V for attention that nobody described: the model's own module, up to its attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sglang_hcache.device.attention import Attention

HIDDEN_STATES = "hidden_states"
_POSITIONS = ("positions", "position_ids")


class _HandedOver(Exception):  # noqa: N818 (no error)
    """K and V have arrived where attention would begin. Carries them."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key = key
        self.value = value


class _HandOver(nn.Module):
    """Takes the place of what attends, and looks like it where it is only looked at."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not registered as a child

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, _query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _HandedOver(key, value)


class GenericProjector:
    """Runs the model's own attention modules until they hand K and V over.

    It works on copies of the modules that share weights, buffers and children with them, but for what attends: the
    model may run on another thread meanwhile.

    Args:
        layers: the attention of every layer, in order.

    Raises:
        ValueError: a module does not take hidden states by this name.
    """

    def __init__(self, layers: Sequence[Attention]) -> None:
        self._layers = tuple(layers)
        self._runners = [_runner(layer) for layer in layers]
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


def _runner(attention: Attention) -> nn.Module:
    """A copy of the attention module that stops where attention would begin."""
    runner = copy.copy(attention.module)
    children = dict(attention.module.named_children())
    children[attention.core] = _HandOver(children[attention.core])
    runner.__dict__["_modules"] = children
    return runner
