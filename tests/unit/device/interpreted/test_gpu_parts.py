"""The checks of ``benchmarks/gpu`` on a CPU: the kernel in the interpreter, on a simulated device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hcache.core.layout import Method
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.device.triton_rows import TritonRows
from tests.unit.capture.save_parts import join_late
from tests.unit.restore.delayed_streams import ORDERS, DelayedStreams

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
SMALL = {"kv_heads": 2, "head_dim": 16, "hidden_size": 48, "heads": 2}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu"]:
        del sys.modules[name]


def small(name: str) -> Any:
    from gpu.shapes import shape_named

    return replace(shape_named(name), **SMALL)


@pytest.mark.parametrize("name", ["llama-2-7b", "opt-30b", "qwen3-8b"])
def test_the_kernel_is_right_and_its_mutants_are_seen(name: str) -> None:
    from gpu.kernel import KernelCheck

    check = KernelCheck(small(name), TritonRows(), torch.device("cpu"), torch.bfloat16, 5, 20)
    found = check.check()
    assert found["ok"], found
    assert not found["mutants_taken"]


def test_a_slot_too_many_is_seen() -> None:
    from gpu.kernel import KernelCheck
    from gpu.layers import WRONG

    check = KernelCheck(small("llama-2-7b"), TritonRows(), torch.device("cpu"), torch.bfloat16, 5, 20)
    pools = check.pools()
    check.run(pools)
    free = next(slot for slot in range(20) if slot not in check.slots.tolist())
    pools[1][free] = 1.0
    assert check.error(pools) == WRONG


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kinds", ["hhh", "kkk", "hhkh"])
def test_saving_is_right(order: str, kinds: str) -> None:
    assert wrong_rows(saving_check(order, kinds)) == 0


@pytest.mark.parametrize("mutant", ["hold_up", "copy_after"])
def test_saving_without_a_wait_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {order: saving_check(order, "hhkh") for order in ORDERS}
    monkeypatch.setattr(DelayedStreams, mutant, lambda *_: None)
    assert any(wrong_rows(check) for check in recorded.values())


def test_a_copy_that_is_joined_with_the_next_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    join_late(monkeypatch, num_layers=4)
    assert any(wrong_rows(saving_check(order, "hhkh")) for order in ORDERS)


def test_no_two_tokens_of_a_pass_have_one_slot() -> None:
    from gpu.saving import PREFILL, SIZES, STEPS, pass_of

    num_slots = 2 * PREFILL - 1
    for step in range(STEPS):
        tokens, _ = pass_of(step, SIZES, PREFILL, num_slots)
        assert len((tokens % num_slots).unique()) == len(tokens), step


def saving_check(order: str, kinds: str) -> Any:
    from gpu.saving import SavingCheck

    streams = DelayedStreams(order)
    methods = [Method.HIDDEN if kind == "h" else Method.KV for kind in kinds]
    return SavingCheck(
        streams, host_buffer, streams.record, methods, 16, torch.float32, sizes=(1, 3, 6), prefill=40
    )


def wrong_rows(check: Any) -> int:
    with torch.inference_mode():
        return int(check.wrong_rows(steps=10))


@pytest.mark.parametrize(
    ("method", "tokens", "layers", "piece"),
    [(Method.HIDDEN, 64, 2, None), (Method.KV, 128, 2, 1)],
)
def test_restores_are_right_and_wrong_ones_are_seen(
    method: Method, tokens: int, layers: int, piece: int | None
) -> None:
    from gpu.layers import MOST_ULPS
    from gpu.restores import RestoreCheck

    check = RestoreCheck(
        small("qwen3-8b"),
        method,
        DelayedStreams(),
        TritonRows(),
        host_buffer,
        tokens=tokens,
        layers=layers,
        dtype=torch.float32,
        piece=piece,
    )
    with torch.inference_mode():
        assert check.error() <= MOST_ULPS
        check.true[1][0][3] += check.true[1][0].abs().max() / 100
        assert check.error() > MOST_ULPS
        check.true[1] = check.pool.read(1, check.slots)
        check.pool.clear()
        check.compute()
        assert check.error_in_pool() <= MOST_ULPS
    check.close()
