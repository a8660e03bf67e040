"""When a call that clears the tiers is answered, and with what."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import ClearHiCacheReqInput
from sglang.srt.managers.scheduler import Scheduler

from sglang_hcache.sglang_plugin import hooks
from sglang_hcache.sglang_plugin.compat.v0_5_17 import clearing
from sglang_hcache.sglang_plugin.compat.v0_5_17.clearing import ClearCalls
from sglang_hcache.sglang_plugin.seam.ranks import Alone


class Server:
    """A scheduler without a model: requests go in, answers come out."""

    def __init__(self) -> None:
        self.clearings: list[threading.Event] = []
        self.sent: list[tuple[bool, Any]] = []
        self.tiers = SimpleNamespace(is_clearing=False, disk_stats=None, disk=object())
        self.reaped = self.paused = 0
        bridge = SimpleNamespace(clear=self.clear, tiers=self.tiers, ranks=Alone())
        bridge.restores = self.restores = SimpleNamespace(
            reap=self.reap, pause=self.pause, waiting=[], running=[]
        )
        self.scheduler: Any = SimpleNamespace(
            session_controller=SimpleNamespace(maybe_reap=lambda _now: None),
            flush_wrapper=SimpleNamespace(check_pending=lambda: None),
            external_corpus_manager=None,
            rust_server=None,
            chunked_req=None,
            last_batch=None,
            running_batch=SimpleNamespace(is_empty=lambda: False),
            tree_cache=SimpleNamespace(bridge=bridge),
            _engine_paused=False,
            ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=self.send)),
            hcache_clear_calls=ClearCalls(),
        )
        self.scheduler._request_dispatcher = lambda request: hooks._clear(self.scheduler, request)

    def clear(self) -> Callable[[], bool]:
        self.clearings.append(threading.Event())
        return self.clearings[-1].is_set

    def reap(self) -> None:
        self.reaped += 1

    def pause(self) -> None:
        self.paused += 1

    def send(self, output: Any, request: Any) -> None:
        self.sent.append((output.success, request))

    def round(self, *requests: Any) -> list[tuple[bool, Any]]:
        """What is answered in a round in which these come."""
        self.sent.clear()
        changed = hooks._requests_come(self.scheduler, list(requests))
        arguments = (self.scheduler, list(requests)) if changed is None else changed[0]
        inspect.unwrap(Scheduler.process_input_requests)(*arguments)
        return list(self.sent)


def test_a_call_is_answered_when_it_is_over() -> None:
    server, first, second = Server(), ClearHiCacheReqInput(), ClearHiCacheReqInput()
    assert server.round(first) == []
    assert server.round(second) == []
    assert server.round() == []
    assert len(server.clearings) == 2, "each clears once"
    server.clearings[1].set()
    ((success, request),) = server.round()
    assert (success, request is second) == (True, True)
    server.clearings[0].set()
    ((success, request),) = server.round()
    assert (success, request is first) == (True, True)
    assert server.round() == []


def test_one_that_is_over_at_once_is_answered_at_once() -> None:
    server = Server()
    server.scheduler.tree_cache.bridge.clear = lambda: lambda: True
    assert [success for success, _ in server.round(ClearHiCacheReqInput())] == [True]


def test_without_a_disk_tier_it_may_take_a_while_too() -> None:
    """Where the cores are busy."""
    server = Server()
    server.tiers.disk = None
    assert server.round(ClearHiCacheReqInput()) == []
    assert server.round() == []
    server.clearings[0].set()
    assert [success for success, _ in server.round()] == [True]


def test_nobody_waits_for_a_disk_tier_that_was_left_out() -> None:
    server = Server()
    server.tiers.is_clearing, server.tiers.disk = True, None
    assert [success for success, _ in server.round(ClearHiCacheReqInput())] == [False]


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    out = SimpleNamespace(path="/a", condition="out", reason="no device")
    well = SimpleNamespace(path="/b", condition="healthy", reason="")
    server.tiers.is_clearing, server.tiers.disk_stats = True, SimpleNamespace(directories=(out, well))
    assert server.round(ClearHiCacheReqInput()) == []
    monkeypatch.setattr(clearing, "_PATIENCE_S", 0.0)
    assert [success for success, _ in server.round()] == [False]
    assert "not all files are deleted (/a is out: no device; /b is healthy)" in caplog.text
    assert server.round() == []


def test_restores_are_settled_before_somebody_asks_whether_the_server_is_idle() -> None:
    """In rounds in which requests come, and while SGLang is paused: then it does not tick."""
    server = Server()
    server.round()
    assert server.reaped == 0
    server.round(ClearHiCacheReqInput())
    assert server.reaped == 1
    server.scheduler._engine_paused = True
    server.round()
    assert server.reaped == 2
    server.restores.waiting.append("somebody")
    server.round()
    assert server.reaped == 2, "it is not idle, and nothing is put into the tree while it is paused"


def test_a_paused_scheduler_leaves_the_processor_to_restores_that_run() -> None:
    server = Server()
    server.scheduler._engine_paused = True
    server.round()
    assert server.paused == 0
    server.restores.running.append("a restore")
    server.round()
    assert server.paused == 1
    server.scheduler._engine_paused = False
    server.round()
    assert server.paused == 1
