"""What restores that run bring of another prompt."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq

from sglang_hcache.sglang_plugin.compat.v0_5_17 import scheduler
from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.testing.stored_chunks import make_keys

KEYS = make_keys(0, 10)


@pytest.mark.parametrize(
    ("restored", "leading"),
    [((0, 10), 10), ((0, 4), 4), ((0, 1), 1), ((5, 9), 0), ((0, 0), 0)],
)
def test_only_what_a_prompt_begins_with_counts(restored: tuple[int, int], leading: int) -> None:
    """One without the beginning is what another request asked for before the tree was flushed."""
    running = Running(Alone())
    job = SimpleNamespace(keys=KEYS[slice(*restored)], num_tokens=0)
    running.add(Mock(job=job, decision=None))
    assert running.leading(KEYS) == leading
    assert running.leading(()) == 0


def test_a_job_that_changes_ends_the_wait() -> None:
    running, waits = Running(Alone()), []
    assert ready(running._bell, 0.0) is False
    threading.Timer(0.01, running.one_has_changed).start()
    running.wait(lambda bell: waits.append(ready(bell, 60.0)))
    running.one_has_changed()
    running.one_has_changed()
    running.wait(lambda bell: waits.append(ready(bell, 60.0)))
    assert waits == [True, True]
    assert ready(running._bell, 0.0) is False, "it was told"
    running.wait()  # for a moment


def scheduler_of(channels: object, receiver: object, num_ranks: int, grammars: bool = False) -> SchedulerOf:
    return SchedulerOf(
        SimpleNamespace(
            ipc_channels=channels, recv_from_tokenizer=receiver, server_args=SimpleNamespace(tp_size=num_ranks),
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: grammars),
        )  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_doze_is_short_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody rings when that is over."""
    monkeypatch.setattr(scheduler, "_DOZE_MS", 60_000)
    context, running = zmq.Context(), Running(Alone())
    with context.socket(zmq.PULL) as receiver, context.socket(zmq.DEALER) as rpc:
        channels = SimpleNamespace(recv_from_tokenizer=receiver, recv_from_rpc=rpc)
        began = time.monotonic()
        running.wait(scheduler_of(channels, receiver, 1, grammars=True).doze)
        assert time.monotonic() - began < 60.0
    context.term()


@contextmanager
def view_and_sockets(
    sees_requests: bool, num_ranks: int
) -> Iterator[tuple[SchedulerOf, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A scheduler's, the socket by which requests come to it, and the one by which they are sent."""
    context = zmq.Context()
    with (
        context.socket(zmq.PULL) as receiver,
        context.socket(zmq.PUSH) as sender,
        context.socket(zmq.DEALER) as rpc,
    ):
        sender.connect(f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}")
        channels = SimpleNamespace(
            recv_from_tokenizer=receiver if sees_requests else None,
            recv_from_rpc=rpc if sees_requests else None,
        )
        yield scheduler_of(channels, receiver, num_ranks), receiver, sender
    context.term()


@pytest.mark.parametrize("sees_requests", [True, False])
def test_a_doze_without_a_bell_is_short_and_does_not_last_for_who_has_come(
    sees_requests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with view_and_sockets(sees_requests, 1) as (view, receiver, sender):
        monkeypatch.setattr(scheduler, "_NAP_MS", 30)
        began = time.monotonic()
        view.doze(None)
        assert 0.02 < time.monotonic() - began < 10.0
        if sees_requests:
            sender.send(b"a request")
            assert receiver.poll(60_000)
            monkeypatch.setattr(scheduler, "_NAP_MS", 60_000)
            view.doze(None)
            assert time.monotonic() - began < 60.0


def ready(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


@pytest.mark.parametrize("sees_requests", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_doze_ends_when_a_request_comes(sees_requests: bool, num_ranks: int) -> None:
    """Where that is not seen, it is short."""
    running = Running(Alone())
    with view_and_sockets(sees_requests, num_ranks) as (view, receiver, sender):
        sender.send(b"a request")
        if sees_requests:
            assert receiver.poll(60_000)
        began = time.monotonic()
        running.wait(view.doze)
        if sees_requests:
            receiver.recv()
        running.one_has_changed()
        running.wait(view.doze)
        assert ready(running._bell, 0.0) is False
        assert time.monotonic() - began < 60.0
