from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import pytest

from sglang_hcache.cli.server.answers import AnswerToken, ChatAnswer, TokenSources
from sglang_hcache.cli.server.client import Message, ServerClient
from sglang_hcache.cli.server.pair import PairedAnswer, ServerPair, Summary, Timings, compare_answers
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
    pair = ServerPair(cast(ServerClient, tier), cast(ServerClient, reference))
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


def answer_of(*tokens: tuple[str, float]) -> ChatAnswer:
    return ChatAnswer(
        text="".join(text for text, _ in tokens),
        tokens=tuple(AnswerToken(text, value) for text, value in tokens),
        sources=TokenSources(device=0, host=0, disk=0, recomputed=1),
        ttft_s=1.0,
        total_s=1.0,
    )


def test_equal_answers() -> None:
    difference = compare_answers(answer_of(("a", -1.0), ("b", -2.0)), answer_of(("a", -1.0), ("b", -2.0005)))
    assert difference.same_tokens
    assert difference.logprob == pytest.approx(5e-4)
    assert difference.is_within(1e-3)
    assert not difference.is_within(1e-4)


@pytest.mark.parametrize(
    "other",
    [
        answer_of(("a", -1.0), ("c", -2.0)),
        answer_of(("a", -1.0)),
        answer_of(),
        answer_of(("a", -1.0), ("b", math.nan)),
    ],
)
def test_unequal_answers(other: ChatAnswer) -> None:
    assert not compare_answers(answer_of(("a", -1.0), ("b", -2.0)), other).is_within(1e-3)


def test_no_tokens_are_not_equal() -> None:
    assert not compare_answers(answer_of(), answer_of()).is_within(1e-3)
