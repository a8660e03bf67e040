"""A forward pass that is queued before the device has ended a restore finds all that it reads.

The device is simulated, as in ``test_stage.py``: a wait that is missing shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.device.streams import Mark
from sglang_hcache.restore.behind import PassesBehind, Written
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.stage import DeviceStage
from tests.unit.restore.bench import LAYERS, Bench
from tests.unit.restore.delayed_streams import MODEL, ORDERS, DelayedStreams
from tests.unit.restore.test_stage import PLACES, device_bench, one_less


class PassBehind:
    """A forward pass that is queued as soon as the device is asked for all of a job, and reads its slots.

    Args:
        prefills: and so reads one layer after the other.
    """

    def __init__(self, bench: Bench, *, prefills: bool) -> None:
        self.left: list[int] = []
        """Tasks that the device had not done by then, of each restore."""
        self.waits: list[int] = []
        """Of each pass, how often it was held up."""
        self._read = torch.zeros(0)
        self._bench, self._prefills = bench, prefills
        stage = bench.restorer.stage
        assert stage is not None
        self._passes = stage.passes
        self._held_up = 0
        hold_up = self._passes._hold_up

        def note(mark: Mark) -> None:
            self._held_up += 1
            hold_up(mark)

        self._passes._hold_up = note
        bench.when_certain = self._queue

    def _queue(self, job: RestoreJob) -> None:
        self.left.append(self._bench.streams.num_waiting)
        assert job.written is not None
        self._passes.come_after(job.written)
        self._read, self._held_up = torch.full((LAYERS, len(job.slots), 8), -1.0), 0
        with self._passes.one_pass(prefills=self._prefills):
            for layer in range(LAYERS):
                for _ in "kv":
                    self._passes.layer(layer)
                self._bench.streams.put(MODEL, lambda layer=layer: self._look(layer, job.slots))
        self.waits.append(self._held_up)

    def _look(self, layer: int, slots: torch.Tensor) -> None:
        self._read[layer] = self._bench.pool.k[layer, slots, 0]

    def is_right(self, first: int) -> bool:
        """Whether it found the chunks from ``first`` on."""
        self._bench.streams.fence().wait()
        key, _ = self._bench.written(first * CHUNK_TOKENS)
        return torch.equal(self._read, key)


@pytest.mark.parametrize("prefills", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_that_is_queued_when_all_is_asked_for_finds_all_of_it(
    order: str, place: str, prefills: bool
) -> None:
    for seed in range(4):
        bench = device_bench(order, seed, place)
        behind = PassBehind(bench, prefills=prefills)
        for first in (0, 2, 1):
            assert bench.run(first=first).state is RestoreState.DONE
            assert behind.is_right(first)
        assert all(behind.left), "the device had something left to do each time"
        bench.engine.close()
        assert behind.waits == ([1, LAYERS, LAYERS] if prefills else [1, 1, 1])


def _ignored(*_: object) -> None:
    pass


def _first_layers(stage: DeviceStage, written: Written) -> Written:
    """As if marks of a restore before it, or of its first part, were taken for its own."""
    kept = stage.__dict__.setdefault("kept", written.layers)
    return replace(written, layers=kept)


def _last_of_each_copy(written: Written) -> Written:
    """As if a mark stood for the last one only of the layers that are copied together."""
    marks = written.layers
    return replace(written, layers={at: mark for at, mark in marks.items() if mark is not marks.get(at + 1)})


def _next_layer(written: Written) -> Written:
    return replace(written, layers={layer: written.layers[max(0, layer - 1)] for layer in written.layers})


_WRITTEN = DeviceStage.written

MUTANTS: dict[str, tuple[bool, Any, str, Any]] = {
    "passes do not wait": (False, DelayedStreams, "hold_up", _ignored),
    "only the pass of the first restore waits": (
        False,
        PassesBehind,
        "come_after",
        lambda self, written: setattr(self, "_written", self._written or written),
    ),
    "one part too few is waited for": (
        False,
        DeviceStage,
        "written",
        lambda self: Written(one_less(self._streams)),
    ),
    "passes that go by layers do not wait": (True, PassesBehind, "layer", lambda self, n: self._named.add(n)),
    "layers of the first restore are waited for": (
        True,
        DeviceStage,
        "written",
        lambda self: _first_layers(self, _WRITTEN(self)),
    ),
    "the layer before is waited for": (
        True,
        DeviceStage,
        "written",
        lambda self: _next_layer(_WRITTEN(self)),
    ),
    "only the last layer of each copy is waited for": (
        True,
        DeviceStage,
        "written",
        lambda self: _last_of_each_copy(_WRITTEN(self)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_pass_that_comes_too_early_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills, owner, method, wrong = MUTANTS[name]
    monkeypatch.setattr(owner, method, wrong)
    seen = []
    for order in ORDERS:
        for place in ("in place", "K and V, in place"):
            bench = device_bench(order, 1, place)
            behind = PassBehind(bench, prefills=prefills)
            for first in (0, 2, 1):
                bench.run(first=first)
                seen.append(behind.is_right(first))
            bench.engine.close()
    assert not all(seen)


@dataclass
class Point:
    there: bool = False

    def is_reached(self) -> bool:
        return self.there

    def wait(self) -> None:
        raise NotImplementedError


@dataclass
class Pass:
    """Asks for passes and notes what they wait for."""

    held: list[Mark] = field(default_factory=list)
    passes: PassesBehind = field(init=False)
    waits_first: bool = True
    """The last one."""

    def __post_init__(self) -> None:
        self.passes = PassesBehind(self.held.append)

    def run(self, layers: Iterable[int], *, prefills: bool = True) -> list[Mark]:
        self.held.clear()
        with self.passes.one_pass(prefills=prefills) as self.waits_first:
            for layer in layers:
                self.passes.layer(layer)
        return list(self.held)


def test_every_pass_waits_until_the_device_has_written_all() -> None:
    """Each may be asked for on another stream. Behind the last restore are those before it."""
    passes, first, second = Pass(), Point(), Point()
    assert not passes.run((), prefills=False)
    passes.passes.come_after(Written(first))
    assert passes.run((), prefills=False) == passes.run((), prefills=False) == [first]
    passes.passes.come_after(Written(second))
    first.there = True
    assert passes.run((), prefills=False) == [second]
    second.there = True
    assert not passes.run((), prefills=False)
    assert passes.passes._written is None


def test_passes_go_by_layers_once_one_has_named_them_all() -> None:
    passes, whole, marks = Pass(), Point(), {0: Point(), 1: Point()}
    written = Written(whole, marks)
    passes.passes.come_after(written)
    assert passes.run([0]) == [whole], "it does not name the other one: neither do those behind it"
    assert passes.run([0, 1]) == [whole]
    assert passes.waits_first, "its time begins behind the restore"
    assert passes.run([0, 0, 1, 1, 2]) == [marks[0], marks[1]]
    assert not passes.waits_first, "it waits within its time, and shares the device"
    assert passes.run([0, 1], prefills=False) == [whole], "a graph is replayed as a whole"
    assert passes.waits_first
    passes.passes.come_after(written.as_a_whole())
    assert passes.run([0, 1]) == [whole], "slots of the restore may be in its hands"
    next_one = Point()
    passes.passes.come_after(Written(next_one, marks))
    assert passes.run([0, 1]) == [next_one], "and in theirs still"
    next_one.there = True
    assert not passes.run([0, 1])
    passes.passes.come_after(written)
    assert passes.run([0, 1]) == [marks[0], marks[1]]
    whole.there = True
    assert not passes.run([0, 1])


def test_a_pass_that_reads_what_it_did_not_name_is_worth_nothing() -> None:
    passes = Pass()
    passes.passes.come_after(Written(Point(), {0: Point(), 1: Point()}))
    passes.run([0, 1])
    with pytest.raises(RuntimeError, match=r"layers \[1\], which are being restored"):
        passes.run([0])


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    passes, marks = Pass(), {0: Point(), 1: Point()}
    passes.passes.come_after(Written(Point(), marks))
    passes.run([0, 1])
    with pytest.raises(ZeroDivisionError), passes.passes.one_pass(prefills=True):
        raise ZeroDivisionError
    passes.held.clear()
    passes.passes.layer(0)  # of a pass of our own, which waits for all
    assert not passes.held
    assert passes.run([0, 1]) == [*marks.values()]
