"""The Triton kernel on the device: the same rows as torch's operations, wrong ones seen, and its speed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from gpu.layers import MOST_ULPS, WRONG, Pools, RandomLayers, damaged, error_ulps, finished
from gpu.results import Report
from gpu.shapes import SHAPES, Shape
from sglang_hcache.device.key_steps import KeySteps
from sglang_hcache.device.row_writers import RowWriter
from sglang_hcache.device.triton_rows import TritonRows

TOKENS, SLOTS_A_TOKEN = 4096, 3
LARGE_POOL = 2**31 + 2**28
"""Values of a pool whose offsets do not fit in 32 bits."""
POISON = -7.0


class KernelCheck:
    """Random K and V rows of one shape.

    Args:
        slots: of the pools.
    """

    def __init__(
        self,
        shape: Shape,
        writer: RowWriter,
        device: torch.device,
        dtype: torch.dtype,
        count: int,
        slots: int,
    ) -> None:
        self.shape, self.writer, self.count = shape, writer, count
        self.steps = RandomLayers.of(shape, 0, 2 * count, dtype, device).steps
        draw = torch.Generator(device).manual_seed(1)
        rows = torch.randn(count, 2 * shape.width, generator=draw, device=device).to(dtype)
        self.key, self.value = rows.chunk(2, dim=1)
        self.positions = torch.randint(2 * count, (count,), generator=draw, device=device)
        self.slots = slots - 2 - torch.randperm(slots - 1, generator=draw, device=device)[:count]
        self._shape = (slots, shape.kv_heads, shape.head_dim)

    def pools(self) -> Pools:
        return (
            torch.full(self._shape, POISON, dtype=self.key.dtype, device=self.key.device),
            torch.full(self._shape, POISON, dtype=self.key.dtype, device=self.key.device),
        )

    def run(self, pools: Pools, steps: KeySteps | None = None, slots: torch.Tensor | None = None) -> None:
        self.writer.finish(
            self.key,
            self.value,
            self.steps if steps is None else steps,
            self.positions,
            self.slots if slots is None else slots,
            pools,
        )

    def error(self, pools: Pools) -> float:
        """Units in the last place; ``WRONG`` where V differs, or another slot was touched."""
        key = finished(self.key.reshape(-1, *self._shape[1:]), self.steps, self.positions)
        value = self.value.reshape(key.shape)
        touched = (pools[0] != POISON).flatten(1).any(dim=1) | (pools[1] != POISON).flatten(1).any(dim=1)
        touched[self.slots] = False
        if bool(touched.any()) or not torch.equal(pools[1][self.slots], value):
            return WRONG
        return error_ulps(pools[0][self.slots], key)

    def check(self) -> dict[str, Any]:
        """The error, and which mutants are taken for right."""
        pools = self.pools()
        self.run(pools)
        taken = []
        mutants = {name: {"steps": steps} for name, steps in damaged(self.steps).items()}
        for name, wrong in {**mutants, "next slot": {"slots": self.slots + 1}}.items():
            others = self.pools()
            self.run(others, **wrong)  # type: ignore[arg-type]
            if self.error(others) <= MOST_ULPS:
                taken.append(name)
        error = self.error(pools)
        return {"ulps": error, "mutants_taken": taken, "ok": error <= MOST_ULPS and not taken}


def measure(report: Report) -> None:
    """Every shape on the first GPU; ``report`` gets each result as soon as it is known."""
    device, dtype, writer = torch.device("cuda", 0), torch.bfloat16, TritonRows()
    for shape in SHAPES:
        check = KernelCheck(shape, writer, device, dtype, TOKENS, SLOTS_A_TOKEN * TOKENS)
        found = check.check()
        pools = check.pools()
        seconds = timed(functools.partial(check.run, pools))
        moved = 4 * TOKENS * shape.width * 2  # K and V, read and written
        key, value = (pool[: 2 * TOKENS] for pool in pools)
        copy_s = timed(functools.partial(key.copy_, value))
        report(
            shape.name,
            {
                **found,
                "microseconds": 1e6 * seconds,
                "gb_per_s": moved / seconds / 1e9,
                "of_a_plain_copy": copy_s / seconds,
            },
        )
    for count in (1, 63, 64, 65, 2047):
        check = KernelCheck(SHAPES[0], writer, device, dtype, count, SLOTS_A_TOKEN * TOKENS)
        report(f"{count} tokens", check.check())
    shape = SHAPES[0]
    check = KernelCheck(shape, writer, device, dtype, TOKENS, LARGE_POOL // shape.width)
    pools = check.pools()
    check.run(pools)
    key = finished(check.key.reshape(-1, shape.kv_heads, shape.head_dim), check.steps, check.positions)
    ulps = error_ulps(pools[0][check.slots], key)
    report("a pool of more than 2**31 values", {"ulps": ulps, "ok": ulps <= MOST_ULPS})


_ASLEEP_CYCLES = 2_000_000
"""About a millisecond."""


def timed(work: Callable[[], object], rounds: int = 30) -> float:
    """Median seconds on the device, after a warm-up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_ASLEEP_CYCLES)  # what is queued behind it is launched by then
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)
