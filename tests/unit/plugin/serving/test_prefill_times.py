"""How long prefills take: told when the device has come to their ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.device.streams import ClockStamp
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


def times_of(clock: Clock, gate: Gate) -> PrefillTimes:
    return PrefillTimes(gate, clock.stamp, largest_pass=512)  # type: ignore[arg-type]


def end(times: PrefillTimes, *rows: tuple[int, int], replayed: str = "") -> None:
    """A pass of (tokens, first position) of each request."""
    requests = [RequestRows(str(number), first, 0, count) for number, (count, first) in enumerate(rows)]
    times.end(requests, is_replayed=bool(replayed), is_prefill=replayed == "prefill")


def test_a_prefill_takes_what_the_device_takes_from_its_begin_on() -> None:
    clock, gate = Clock(), Gate()
    times = times_of(clock, gate)
    clock.busy_until = 5.0  # with a pass before it
    times.begin(640)
    clock.busy_until += 2.0
    end(times, (640, 64))
    times.begin(640)  # a pass that is none of ours, or fails
    times.begin(640)
    clock.busy_until += 0.5
    end(times, (128, 0))
    times.look()
    assert gate.told == []
    clock.now = 7.0
    times.look()
    assert gate.told == [(640, 64, 2.0)]
    clock.now = 8.0
    times.look()
    times.look()
    assert gate.told == [(640, 64, 2.0), (128, 0, 0.5)]


@pytest.mark.parametrize(
    ("rows", "replayed", "tells"),
    [
        ([(64, 128)], "", True),
        ([(1, 192)], "decode", False),
        ([(63, 0)], "", False),
        ([(64, 0), (64, 0)], "", False),
        ([(64, 128)], "prefill", False),  # a graph launches little
        ([(512, 512)], "prefill", True),  # so are all others of a long prompt
        ([(512, 512)], "decode", False),
    ],
)
def test_what_tells_of_prefills(rows: list[tuple[int, int]], replayed: str, tells: bool) -> None:
    clock, gate = Clock(), Gate()
    times = times_of(clock, gate)
    times.begin(sum(count for count, _ in rows))
    end(times, *rows, replayed=replayed)
    times.look()
    assert bool(gate.told) is tells


def test_an_end_without_a_begin_is_nothing() -> None:
    clock, gate = Clock(), Gate()
    times = times_of(clock, gate)
    end(times, (640, 0))
    times.look()
    assert gate.told == []


def test_on_a_cpu_a_pass_is_over_when_it_ends() -> None:
    gate = Gate()
    times = PrefillTimes(gate, ClockStamp, largest_pass=512)  # type: ignore[arg-type]
    times.begin(640)
    time.sleep(0.01)
    end(times, (128, 0))
    times.look()
    ((count, start, seconds),) = gate.told
    assert (count, start) == (128, 0)
    assert seconds >= 0.01
