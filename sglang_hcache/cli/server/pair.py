"""The same requests to a server with the tier and to one without it, compared answer by answer."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hcache.cli.server.answers import ChatAnswer
from sglang_hcache.cli.server.client import Message, ServerClient
from sglang_hcache.cli.server.process import ServerProcess

LOGPROB_TOLERANCE = 1e-3
"""Two float32 answers are equal if their tokens are, and their logprobs within this."""
_SAVING_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """How far two answers to one prompt are apart."""

    same_tokens: bool
    logprob: float
    """Largest difference between the logprobs of tokens at the same place; infinite if there is none to compare."""

    def is_within(self, tolerance: float) -> bool:
        """Whether the answers count as equal."""
        return self.same_tokens and self.logprob <= tolerance


def compare_answers(one: ChatAnswer, other: ChatAnswer) -> AnswerDifference:
    """Compare token by token."""
    same_tokens = [token.text for token in one.tokens] == [token.text for token in other.tokens]
    pairs = zip(one.tokens, other.tokens, strict=False)
    differences = [abs(a.logprob - b.logprob) for a, b in pairs]
    # A NaN must not hide: it would compare as neither larger nor smaller.
    if not differences or any(difference != difference for difference in differences):
        return AnswerDifference(same_tokens, float("inf"))
    return AnswerDifference(same_tokens, max(differences))


@dataclass(frozen=True, slots=True)
class PairedAnswer:
    """One request's two answers."""

    tier: ChatAnswer
    reference: ChatAnswer
    """From the server without the tier."""

    @property
    def difference(self) -> AnswerDifference:
        return compare_answers(self.tier, self.reference)

    @property
    def is_equal(self) -> bool:
        return self.difference.is_within(LOGPROB_TOLERANCE)

    @property
    def speedup(self) -> float:
        """TTFT without the tier over TTFT with it."""
        return self.reference.ttft_s / self.tier.ttft_s


class ServerPair:
    """Asks a server with the tier and one without, one request at a time so that neither disturbs the other.

    Which of the two is asked first alternates. Before each request the tier has finished saving: what it
    writes in the background must not slow down the measurement of the other server.
    """

    def __init__(self, tier: ServerClient, reference: ServerClient) -> None:
        self._tier = tier
        self._reference = reference
        self._tier_first = True

    def ask(self, messages: Sequence[Message], *, max_tokens: int) -> PairedAnswer:
        """Send ``messages`` to both.

        Raises:
            ChatError: one of them refused or failed.
        """
        if self._tier_first:
            tier = self._ask_tier(messages, max_tokens)
            reference = self._reference.ask(messages, max_tokens=max_tokens)
        else:
            reference = self._reference.ask(messages, max_tokens=max_tokens)
            tier = self._ask_tier(messages, max_tokens)
        self._tier_first = not self._tier_first
        return PairedAnswer(tier, reference)

    def _ask_tier(self, messages: Sequence[Message], max_tokens: int) -> ChatAnswer:
        answer = self._tier.ask(messages, max_tokens=max_tokens)
        self._tier.wait_saved(_SAVING_TIMEOUT_S)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run of paired answers in numbers. Tokens are prompt tokens of the server with the tier."""

    requests: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    device_requests: int
    """Requests with at least one token from the GPU cache; likewise the next two."""
    host_requests: int
    disk_requests: int
    restored_requests: int
    unequal: int
    """Requests whose two answers differ."""
    largest_difference: float
    """The largest one of logprobs."""

    @classmethod
    def of(cls, answers: Sequence[PairedAnswer]) -> Summary:
        sources = [answer.tier.sources for answer in answers]
        return cls(
            requests=len(answers),
            prompt_tokens=sum(source.prompt for source in sources),
            device_tokens=sum(source.device for source in sources),
            host_tokens=sum(source.host for source in sources),
            disk_tokens=sum(source.disk for source in sources),
            recomputed_tokens=sum(source.recomputed for source in sources),
            device_requests=sum(source.device > 0 for source in sources),
            host_requests=sum(source.host > 0 for source in sources),
            disk_requests=sum(source.disk > 0 for source in sources),
            restored_requests=sum(source.restored > 0 for source in sources),
            unequal=sum(not answer.is_equal for answer in answers),
            largest_difference=max((answer.difference.logprob for answer in answers), default=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """TTFT of a set of requests with and without the tier, seconds."""

    requests: int
    tier_mean_s: float
    tier_median_s: float
    reference_mean_s: float
    reference_median_s: float
    median_speedup: float
    """Median of the requests' own speed-ups."""
    total_speedup: float
    """All TTFTs without the tier over all with it."""

    @classmethod
    def of(cls, answers: Sequence[PairedAnswer]) -> Timings | None:
        """None if there is nothing to summarise."""
        if not answers:
            return None
        tier = [answer.tier.ttft_s for answer in answers]
        reference = [answer.reference.ttft_s for answer in answers]
        return cls(
            requests=len(answers),
            tier_mean_s=statistics.fmean(tier),
            tier_median_s=statistics.median(tier),
            reference_mean_s=statistics.fmean(reference),
            reference_median_s=statistics.median(reference),
            median_speedup=statistics.median(answer.speedup for answer in answers),
            total_speedup=sum(reference) / sum(tier),
        )


def launch_together(
    servers: Sequence[ServerProcess], progress: Callable[[float], None] | None = None
) -> None:
    """Start ``servers`` at the same time; all are gone if one of them fails.

    Args:
        progress: called with the seconds waited so far.
    """
    began = time.monotonic()
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready(lambda _: progress(time.monotonic() - began) if progress is not None else None)
    except BaseException:
        kill_all(servers)
        raise


def kill_all(servers: Sequence[ServerProcess]) -> None:
    """Kill each of ``servers``, also if a signal or an error ends the killing of another one."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
