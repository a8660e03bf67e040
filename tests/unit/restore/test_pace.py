"""A restore that leaves most of a device to those who decode."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from sglang_hcache.core.errors import RestoreCancelledError
from sglang_hcache.core.layout import Method
from sglang_hcache.restore import pace
from sglang_hcache.restore.methods import LayerRestorer
from sglang_hcache.restore.pace import YIELDING_SHARE, Pace
from sglang_hcache.restore.rows import StoredRows
from sglang_hcache.restore.stage import DeviceStage, StageSizes
from tests.unit.restore.bench import SLOTS, WIDTH, DoubleAndPosition, EachLayer, Pool
from tests.unit.restore.delayed_streams import DelayedStreams

ROW_S = 1e-6


@dataclass
class _Stamp:
    device: Device
    at: float

    def is_reached(self) -> bool:
        return self.device.now >= self.at

    def seconds_since(self, earlier: _Stamp) -> float:
        return self.at - earlier.at


class Device:
    """It projects a row in ``ROW_S``, in order, ``slower`` times as long where others use it, too. And the clock."""

    def __init__(self) -> None:
        self.now, self.busy_until, self.slower = 0.0, 0.0, 1.0

    def project(self, num_rows: int) -> None:
        self.busy_until = max(self.busy_until, self.now) + num_rows * ROW_S * self.slower

    def stamp(self) -> _Stamp:
        return _Stamp(self, max(self.now, self.busy_until))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr(pace, "time", clock)
    return made


def project_all(device: Device, made: Pace, count: int) -> list[int]:
    parts = []
    for part in made.parts(count):
        parts.append(part.stop - part.start)
        device.project(parts[-1])
    return parts


def test_without_others_it_does_not_wait(device: Device) -> None:
    made = Pace(device.stamp)
    assert project_all(device, made, 8192) == [8192]
    assert device.now == 0.0


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_with_others_it_takes_a_share_of_the_time(device: Device, slower: float) -> None:
    """Also where their passes, which go first, make each part take longer: the shortest times count."""
    made = Pace(device.stamp)
    made.turn(True)
    project_all(device, made, 1024)
    device.now = device.busy_until
    device.slower = slower
    began = device.now
    assert set(project_all(device, made, 400 * 1024)) == {1024}
    assert device.now - began == pytest.approx(400 * 1024 * ROW_S / YIELDING_SHARE, rel=0.02)


def test_time_that_was_not_used_is_not_made_up_for(device: Device) -> None:
    made = Pace(device.stamp)
    made.turn(True)
    project_all(device, made, 1024)
    device.now = began = 100.0
    project_all(device, made, 10 * 1024)
    assert device.now - began == pytest.approx(9 * 1024 * ROW_S / YIELDING_SHARE)


def test_the_first_part_of_all_is_waited_for(device: Device) -> None:
    """Nobody knows before how long to wait."""
    made = Pace(device.stamp)
    made.turn(True)
    parts = made.parts(3 * 1024)
    for _ in range(2):
        next(parts)
        assert device.now >= device.busy_until, "nothing of ours is left to do"
        device.project(1024)
    next(parts)
    assert device.now == pytest.approx(device.busy_until - 1024 * ROW_S + 1024 * ROW_S / YIELDING_SHARE)


def test_a_first_part_that_took_long_for_others_holds_up_nobody(device: Device) -> None:
    """The device was busy with something else when the first part of all came."""
    made = Pace(device.stamp)
    made.turn(True)
    device.slower = 1000.0
    project_all(device, made, 1024)
    device.now, device.slower = device.busy_until, 1.0
    began = device.now
    project_all(device, made, 10 * 1024)
    assert device.now - began == pytest.approx(9 * 1024 * ROW_S / YIELDING_SHARE, abs=0.01)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_who_stops_a_restore_does_not_wait_for_its_pauses(device: Device, num_parts: int) -> None:
    """Neither for that of the first part, whose end nobody knows, nor for the next ones."""
    made, slept = Pace(device.stamp), 0.0
    made.turn(True)
    device.slower = 1000.0

    def check() -> None:
        if device.now > slept:
            raise RestoreCancelledError

    parts = made.parts(3 * 1024, check)
    for _ in range(num_parts):
        slept = device.now + 2.0
        next(parts)
        device.project(1024)
    slept = device.now
    with pytest.raises(RestoreCancelledError):
        next(parts)
    assert device.now - slept < 0.01
    assert device.busy_until > device.now + 0.5


def test_it_says_whether_it_changes(device: Device) -> None:
    made = Pace(device.stamp)
    assert [made.turn(yields) for yields in (False, True, True, False)] == [False, True, False, True]


def test_a_restore_hands_it_its_check(device: Device) -> None:
    """A job that is cancelled ends also between two parts of a layer."""
    stage = DeviceStage(DelayedStreams(), StageSizes(50 * 4 * WIDTH, 50 * 8 * WIDTH), SLOTS)
    stage.pace = Pace(device.stamp)
    stage.pace.turn(True)
    looked: list[None] = []
    pool, projector = Pool(), DoubleAndPosition()
    restorer = LayerRestorer(torch.float32, pool, 1, projector, stage=stage, layers=EachLayer(pool))  # type: ignore[arg-type]
    hidden, slots = torch.randn(80, WIDTH), torch.randperm(SLOTS)[:80]
    device.busy_until = 1.0
    stored = [StoredRows.of(0, Method.HIDDEN, hidden)]
    for part in restorer.start(stored, restorer.positions(0, 80), slots, lambda: looked.append(None)):
        part.result()
    assert len(looked) > 100


@pytest.mark.parametrize("yields", [False, True])
def test_rows_are_projected_in_such_parts(yields: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_ROWS_BETWEEN", 20)
    noted: list[int] = []

    class Projector(DoubleAndPosition):
        def project(
            self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            noted.append(len(hidden))
            return super().project(layer, hidden, positions)

    pool = Pool()
    stage = DeviceStage(DelayedStreams(), StageSizes(50 * 4 * WIDTH, 50 * 8 * WIDTH), SLOTS)
    stage.pace.turn(yields)
    restorer = LayerRestorer(torch.float32, pool, 1, Projector(), stage=stage, layers=EachLayer(pool))  # type: ignore[arg-type]
    hidden, slots = torch.randn(80, WIDTH), torch.randperm(SLOTS)[:80]
    restorer.restore([StoredRows.of(0, Method.HIDDEN, hidden)], restorer.positions(0, 80), slots)
    assert noted == ([20, 20, 10, 20, 10] if yields else [50, 30])
    assert torch.equal(pool.k[0][slots, 0], hidden * 2)
    assert torch.equal(pool.v[0][slots, 0, 0], torch.arange(80.0))
