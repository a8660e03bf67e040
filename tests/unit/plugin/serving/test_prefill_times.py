"""Prefills on a device that is only asked: their times are told when it has come to their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hcache.sglang_plugin.serving.prefill_times import PrefillTimes


@dataclass
class At:
    seconds: float
    clock: Clock

    def is_reached(self) -> bool:
        return self.seconds <= self.clock.now

    def seconds_since(self, earlier: At) -> float:
        return self.seconds - earlier.seconds


class Clock:
    """A device that is at ``now``, and has work until ``busy_until``."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def stamp(self) -> At:
        return At(self.busy_until, self)


class Gate:
    def __init__(self) -> None:
        self.told: list[tuple[int, int, float]] = []

    def prefilled(self, num_tokens: int, start: int, seconds: float) -> None:
        self.told.append((num_tokens, start, seconds))


def test_a_prefill_takes_what_the_device_takes_from_its_begin_on() -> None:
    clock, gate = Clock(), Gate()
    stage: Any = clock
    times = PrefillTimes(gate, stage)  # type: ignore[arg-type]
    clock.busy_until = 5.0  # with a pass before it
    times.begin()
    clock.busy_until += 2.0
    times.end(640, 64)
    times.begin()  # a pass that is none of ours, or fails
    times.begin()
    clock.busy_until += 0.5
    times.end(128, 0)
    times.look()
    assert gate.told == []
    clock.now = 7.0
    times.look()
    assert gate.told == [(640, 64, 2.0)]
    clock.now = 8.0
    times.look()
    times.look()
    assert gate.told == [(640, 64, 2.0), (128, 0, 0.5)]


def test_an_end_without_a_begin_is_nothing() -> None:
    clock, gate = Clock(), Gate()
    stage: Any = clock
    times = PrefillTimes(gate, stage)  # type: ignore[arg-type]
    times.end(640, 0)
    times.look()
    assert gate.told == []
