"""What the bridge does once a scheduler round, and when it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.sglang_plugin.serving.idling import Idling


class Round:
    """A bridge with stand-ins for what it asks, and the calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.naps: list[None] = []
        self.is_running = False
        self.admits = False
        self.running = SimpleNamespace(
            tokens=0, is_recomputing=False, wait=lambda _doze: self.calls.append("wait")
        )
        self.bridge: Any = object.__new__(Bridge)
        self.bridge._unnamed = []
        self.bridge._maker = SimpleNamespace(keep_pace=lambda waiting, running: None)
        self.bridge.saving = SimpleNamespace(is_busy=False, tick=lambda: None)
        self.bridge.restores = SimpleNamespace(
            tick=lambda: self.calls.append("tick"),
            go_on=lambda: self.calls.append("go on"),
            waiting=SimpleNamespace(num_restoring=0),
            may_be_admitted=lambda rid: self.admits,
            running=self.running,
            scheduler=SimpleNamespace(
                is_running=lambda: self.is_running,
                waiting=lambda: [SimpleNamespace(rid="b")],
                doze=self.naps.append,
            ),
        )
        self.bridge._idling = Idling(self.bridge.restores, self.bridge.saving)

    def round(self) -> list[str]:
        """The calls of one."""
        self.calls.clear()
        self.bridge.tick()
        return list(self.calls)


def test_the_pace_is_set_by_who_waits_before_restores_start() -> None:
    world = Round()
    world.bridge.restores.waiting.num_restoring = 3
    world.bridge._maker.keep_pace = lambda waiting, _: world.calls.append(f"pace {waiting.num_restoring}")
    assert world.round() == ["pace 3", "tick"]


def test_a_restore_that_ends_while_it_is_waited_for_is_settled_in_this_round() -> None:
    """SGLang looks at its queue right behind the call."""
    world = Round()
    world.running.tokens = 64
    assert world.round() == ["tick", "wait", "go on"]


def test_nobody_waits_for_another_ones_restore_before_a_request_is_admitted() -> None:
    world = Round()
    world.running.tokens, world.admits = 64, True
    assert world.round() == ["tick"]
    assert world.round() == ["tick", "wait", "go on"], "SGLang had no room for it: do not spin"
    assert world.round() == ["tick"]


def test_nobody_pauses_for_what_is_saved_before_a_request_is_admitted() -> None:
    world = Round()
    world.bridge.saving.is_busy, world.admits = True, True
    assert world.round() == ["tick"]
    assert not world.naps
    world.admits = False
    assert world.round() == ["tick"]
    assert world.naps == [None]


def test_nobody_waits_while_requests_run_or_layers_are_recomputed() -> None:
    world = Round()
    world.running.tokens, world.bridge.saving.is_busy = 64, True
    world.is_running = True
    assert world.round() == ["tick"]
    world.is_running, world.running.is_recomputing = False, True
    assert world.round() == ["tick"]
    assert not world.naps
