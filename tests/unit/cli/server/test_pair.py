from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from sglang_hcache.cli.server.client import AnswerToken, ChatAnswer, ChatClient, Message, TokenSources
from sglang_hcache.cli.server.pair import PairedAnswer, ServerPair, Summary, Timings
from sglang_hcache.testing.zipf import zipf_order


def answer(*, ttft_s: float = 1.0, logprob: float = -1.0, host: int = 0, disk: int = 0) -> ChatAnswer:
    return ChatAnswer(
        text="a",
        tokens=(AnswerToken("a", logprob),),
        sources=TokenSources(device=4, host=host, disk=disk, recomputed=100 - 4 - host - disk),
        ttft_s=ttft_s,
        total_s=ttft_s,
    )


class FakeClient:
    """Notes what it is asked; answers with what it was given."""

    def __init__(self, name: str, events: list[str], given: ChatAnswer) -> None:
        self._name, self._events, self._given = name, events, given

    def ask(self, _messages: Any, *, max_tokens: int) -> ChatAnswer:
        self._events.append(f"{self._name} {max_tokens}")
        return self._given

    def wait_saved(self, _timeout_s: float) -> bool:
        self._events.append("saved")
        return True


def test_servers_take_turns_in_being_first_and_saving_is_over_in_between() -> None:
    events: list[str] = []
    tier, reference = FakeClient("tier", events, answer()), FakeClient("plain", events, answer(ttft_s=2.0))
    pair = ServerPair(cast(ChatClient, tier), cast(ChatClient, reference))
    requests = [[Message(role="user", content=text)] for text in ("one", "two")]
    answers = [pair.ask(request, max_tokens=8) for request in requests]
    assert events == ["tier 8", "saved", "plain 8", "plain 8", "tier 8", "saved"]
    assert [found.speedup for found in answers] == [2.0, 2.0]


def test_summary() -> None:
    summary = Summary.of(
        [
            PairedAnswer(answer(host=64), answer()),
            PairedAnswer(answer(host=32, disk=64), answer(logprob=-1.0005)),
            PairedAnswer(answer(), answer(logprob=-1.1)),
        ]
    )
    assert (summary.requests, summary.prompt_tokens, summary.device_tokens) == (3, 300, 12)
    assert (summary.host_tokens, summary.disk_tokens, summary.recomputed_tokens) == (96, 64, 128)
    assert (summary.host_requests, summary.disk_requests, summary.restored_requests) == (2, 1, 2)
    assert summary.unequal == 1
    assert summary.largest_difference == pytest.approx(0.1)


def test_timings() -> None:
    pairs = [(1.0, 4.0), (2.0, 2.0), (1.0, 3.0)]
    timings = Timings.of([PairedAnswer(answer(ttft_s=a), answer(ttft_s=b)) for a, b in pairs])
    assert timings is not None
    assert (timings.tier_median_s, timings.reference_median_s) == (1.0, 3.0)
    assert (timings.median_speedup, timings.total_speedup) == (3.0, 2.25)
    assert Timings.of([]) is None


def test_zipf_order() -> None:
    order = zipf_order(10, 4000, alpha=1.0, seed=1)
    assert order == zipf_order(10, 4000, alpha=1.0, seed=1)
    assert order != zipf_order(10, 4000, alpha=1.0, seed=2)
    counts = [count for _, count in Counter(order).most_common()]
    assert len(counts) == 10
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.2)
    assert counts[0] / counts[9] == pytest.approx(10.0, rel=0.35)
