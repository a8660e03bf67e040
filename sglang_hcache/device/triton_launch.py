"""Launches of Triton's kernels: what it compiled for such arguments before, without looking for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Grid = tuple[int, int, int]
"""Programs."""


class Launches:
    """One kernel with one set of constants and options, launched on the current device and stream. For one thread.

    At each launch Triton looks at all arguments to find what it has compiled for such ones, which takes half of the
    time. Besides constants, options and device, it distinguishes tensors by their dtype and whether their address is a
    multiple of 16, and numbers by their type, their width, and whether they are 1 or a multiple of 16. Here tensors are
    distinguished by the rest of that division, and numbers by type and value: what is found here is found there, too.

    Args:
        kernel: whose constants come last.
        constants: and options.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._constants = constants
        self._last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, grid: Grid, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> None:
        """All tensors are on the current device, and numbers few different ones."""
        kind = (
            tensors[0].get_device(),
            *[(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors],
            *[(number.__class__, number) for number in numbers],
        )
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *self._last)
            return
        compiled = self._kernel[grid](*tensors, *numbers, **self._constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[kind] = compiled
