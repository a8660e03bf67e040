"""What was compiled for some arguments is launched for others only if Triton itself would do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from sglang_hcache.device.triton_launch import Launches

GRID, CONSTANTS = (7, 2, 1), {"BLOCK": 8, "num_warps": 4, "WIDTH": 6}
NAMES = ["one", "other", "count", "epsilon", "WIDTH", "BLOCK"]
MEMORY = torch.zeros(64, dtype=torch.uint8)
Tensors, Numbers = Sequence[torch.Tensor], Sequence[int | float]


def specialized(arguments: Sequence[object]) -> list[tuple[object, object]]:
    """What Triton compiles for."""
    return [native_specialize_impl(BaseBackend, argument, False, True, True) for argument in arguments]


class Compiled:
    def __init__(self, kind: object) -> None:
        self.kind = kind
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        assert grid == GRID

        def launch(*arguments: Any) -> None:
            assert specialized(arguments[:4]) == self.kind
            assert arguments[4:] == (6, 8), "constants in the kernel's order, and no options"
            self.launched.append(arguments)

        return launch


class Kernel:
    """As Triton's: it compiles, launches, and returns what it has compiled."""

    arg_names = NAMES

    def __init__(self, *, interprets: bool = False) -> None:
        self.made: list[Compiled] = []
        self._interprets = interprets

    def __getitem__(self, grid: object) -> Callable[..., Compiled | None]:
        assert grid == GRID

        def launch(*arguments: Any, **constants: object) -> Compiled | None:
            assert constants == CONSTANTS
            self.made.append(Compiled(specialized(arguments)))
            return None if self._interprets else self.made[-1]

        return launch


def view(first: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of an address that is so much larger than a multiple of 16."""
    begin = -MEMORY.data_ptr() % 16 + first
    return MEMORY[begin : begin + 16].view(dtype)


def test_a_kernel_is_looked_for_once() -> None:
    kernel = Kernel()
    launches = Launches(kernel, CONSTANTS)
    tensors, others, numbers = (view(0), view(4)), (view(16), view(20)), (3, 0.5)
    launches(GRID, tensors, numbers)
    launches(GRID, others, numbers)
    launches(GRID, tensors, numbers)
    (made,) = kernel.made
    assert [[tensor.data_ptr() for tensor in launched[:2]] for launched in made.launched] == [  # type: ignore[attr-defined]
        [tensor.data_ptr() for tensor in pair] for pair in (others, tensors)
    ]
    assert [launched[2:4] for launched in made.launched] == [numbers] * 2


def test_the_interpreter_compiles_nothing() -> None:
    kernel = Kernel(interprets=True)
    launches = Launches(kernel, CONSTANTS)
    for _ in range(3):
        launches(GRID, (view(0), view(0)), (3, 0.5))
    assert len(kernel.made) == 3


@pytest.mark.parametrize(
    ("tensors", "numbers"),
    [
        ((view(2), view(0)), (3, 0.5)),
        ((view(0), view(8)), (3, 0.5)),
        ((view(0), view(0, torch.float16)), (3, 0.5)),
        ((view(0), view(0)), (1, 0.5)),
        ((view(0), view(0)), (16, 0.5)),
        ((view(0), view(0)), (2**31, 0.5)),
        ((view(0), view(0)), (3.0, 0.5)),
        ((view(0), view(0)), (3, 1)),
    ],
)
def test_what_was_compiled_for_other_arguments_is_not_launched(tensors: Tensors, numbers: Numbers) -> None:
    kernel = Kernel()
    launches = Launches(kernel, CONSTANTS)
    launches(GRID, (view(0), view(0)), (3, 0.5))
    launches(GRID, tensors, numbers)
    first, second = kernel.made
    assert first.kind != second.kind
    assert not first.launched


_TENSORS = st.builds(
    view, st.integers(0, 7).map(lambda half: 4 * half), st.sampled_from([torch.float32, torch.int32])
)
_NUMBERS = st.one_of(st.sampled_from([0, 1, 16, 17, 2**31, -1, 0.0, 1.0, 16.0]), st.integers(-(2**40), 2**40))


@given(st.lists(st.tuples(st.tuples(_TENSORS, _TENSORS), st.tuples(_NUMBERS, _NUMBERS)), max_size=20))
def test_any_arguments(calls: list[tuple[Tensors, Numbers]]) -> None:
    """What is launched looks at its arguments."""
    launches = Launches(Kernel(), CONSTANTS)
    for tensors, numbers in calls:
        launches(GRID, tensors, numbers)
