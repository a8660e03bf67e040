"""The requests of ``overhead.py``: to a server with the tier and to one without it, in turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.model import BenchModel
from common.precision import EXACT, FINEST_ON_GPU
from common.statistics import median_with_interval
from common.turns import in_turn
from serving.pair import OFF, TIER
from serving.token_client import TokenAnswer, TokenClient, compare
from sglang_hcache.core.layout import CHUNK_TOKENS

_COMPANY = 4
"""Requests that decode while a restore runs."""
_COMPANY_TOKENS = 192
"""Of their answers; the first quarter does not count, for others are prefilled meanwhile."""
_SHORT_PROMPT = 128
"""Tokens of prompts of requests that decode together."""
_TAIL = 20
"""Tokens that a history lacks of its last chunk."""
_PIECE = 4096
"""Tokens of a history that is to come back which are computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    prompt: int
    """Tokens of prompts that nobody asked before."""
    in_a_row: int
    """Prefills that are measured until all of them are saved: what saving defers is part of the time there. 0: none."""
    histories: tuple[int, ...]
    """Tokens of prompts that come back."""
    long_history: int
    """Tokens of the one that comes back while others decode."""
    batches: tuple[int, ...]
    """Requests that decode together."""
    decoded: int
    """Tokens of each answer in a batch whose TBT is compared, in whole chunks; the first chunk does not count."""
    rounds: int
    short_rounds: int
    """Of prefill, of decoding and of hits on the device."""
    warm_up: int
    """Rounds before them that do not count."""
    starts: int
    """Of each server alone; 0: the starts for everything else are timed."""
    chunks: int
    """Of the disk tier that is looked into."""
    host_bytes: int
    has_disk: bool
    method: str
    tier_arguments: tuple[str, ...]
    """More of them, of the server with the tier."""
    seed: int

    @property
    def pool_tokens(self) -> int:
        """Of the KV pool: the longest prompt, all that decode at once, and as many as a few short prompts."""
        answers = max(max(self.batches) * self.decoded, _COMPANY * _COMPANY_TOKENS)
        asked = max(*self.batches, _COMPANY) * _SHORT_PROMPT
        return max(*self.histories, self.long_history, self.prompt) + asked + answers + 2048


def section_names(settings: Settings) -> list[str]:
    """What requests measure, in order."""
    return [
        "prefill",
        *(["prefills in a row"] if settings.in_a_row else []),
        *(f"decoding, {batch} at once" for batch in settings.batches),
        *(f"{length} tokens on the device" for length in settings.histories),
        *(f"{length} tokens return" for length in settings.histories),
        "decoding while others return",
    ]


class PairedRequests:
    """Requests to both servers.

    Args:
        clients: ``TIER`` and ``OFF``.
        dtype: in which both compute.
    """

    def __init__(
        self, settings: Settings, model: BenchModel, clients: dict[str, TokenClient], dtype: str
    ) -> None:
        self._settings = settings
        self._dtype = dtype
        self.clients = clients
        self._prompt = partial(model.random_prompt, np.random.default_rng(settings.seed))

    def sections(self) -> Iterator[tuple[str, Callable[[], Awaitable[list[dict[str, Any]]]]]]:
        """What is measured, by its name."""
        lengths = self._settings.histories
        sections = (
            self._prefill,
            *([self._prefills_in_a_row] if self._settings.in_a_row else []),
            *(partial(self._decode, batch) for batch in self._settings.batches),
            *(partial(self._on_device, length) for length in lengths),
            *(partial(self._returning, length) for length in lengths),
            self._company,
        )
        return zip(section_names(self._settings), sections, strict=True)

    async def _alternate(
        self, rounds: int, once: Callable[[TokenClient, int], Awaitable[float]]
    ) -> dict[str, list[float]]:
        """``once(client, round)`` for both servers in each round; which one comes first alternates."""
        times: dict[str, list[float]] = {OFF: [], TIER: []}
        for number in range(-self._settings.warm_up, rounds):
            for name in in_turn((OFF, TIER), number):
                seconds = await once(self.clients[name], number)
                await self.clients[TIER].settle()
                if number >= 0:
                    times[name].append(seconds)
        return times

    async def _prefill(self) -> list[dict[str, Any]]:
        rounds, size = self._settings.short_rounds, self._settings.prompt
        prompts = {number: self._prompt(size) for number in range(-self._settings.warm_up, rounds)}

        async def once(client: TokenClient, number: int) -> float:
            return (await client.ask(prompts[number], max_tokens=1, is_compared=False)).ttft_s

        return [paired_row(f"prefill of {size} tokens", await self._alternate(rounds, once))]

    async def _prefills_in_a_row(self) -> list[dict[str, Any]]:
        rounds, size, count = self._settings.rounds, self._settings.prompt, self._settings.in_a_row
        numbers = range(-self._settings.warm_up, rounds)
        prompts = {number: [self._prompt(size) for _ in range(count)] for number in numbers}

        async def several(client: TokenClient, number: int) -> float:
            began = time.perf_counter()
            for prompt in prompts[number]:
                await client.ask(prompt, max_tokens=1, is_compared=False)
            await client.settle()
            return (time.perf_counter() - began) / count

        before = await self._saved_rows()
        times = await self._alternate(rounds, several)
        saved = (await self._saved_rows() - before) / (len(numbers) * count)
        row = paired_row(f"prefills of {size} tokens, {count} in a row with all saving", times)
        return [row | {"saved_rows": saved}]

    async def _decode(self, batch: int) -> list[dict[str, Any]]:
        """Mean times between tokens, over whole chunks: what is saved of a chunk is worked on when it is complete."""
        decoded = self._settings.decoded
        before = await self._saved_rows()

        async def once(client: TokenClient, _: int) -> float:
            prompts = [self._prompt(_SHORT_PROMPT) for _ in range(batch)]
            asks = [client.ask(prompt, max_tokens=decoded, is_compared=False) for prompt in prompts]
            answers = await asyncio.gather(*asks)
            return statistics.fmean(gap for answer in answers for gap in answer.gaps_s[CHUNK_TOKENS - 1 :])

        times = await self._alternate(self._settings.short_rounds, once)
        rounds = self._settings.short_rounds + self._settings.warm_up
        saved = (await self._saved_rows() - before) / (rounds * batch)
        return [paired_row(f"decoding, {batch} at once: TBT", times) | {"saved_rows": saved}]

    async def _saved_rows(self) -> int:
        """Rows that the tier has put into chunks since its start."""
        await self.clients[TIER].settle()
        state = await self.clients[TIER].tier_state()
        return 0 if state is None else int(state["counters"].get("capture.rows", 0))

    async def _on_device(self, length: int) -> list[dict[str, Any]]:
        """What the tier does not help, for nothing was evicted. Histories end inside of a chunk, as most do."""
        history = self._prompt(length - _TAIL)
        device: dict[str, list[int]] = {OFF: [], TIER: []}

        async def once(client: TokenClient, number: int) -> float:
            answer = await client.ask([*history, *self._prompt(64)], max_tokens=1, is_compared=False)
            if number >= 0:
                device[TIER if client is self.clients[TIER] else OFF].append(answer.sources.device)
            return answer.ttft_s

        times = await self._alternate(self._settings.short_rounds, once)
        row = paired_row(f"{length} tokens on the device, 64 are new: TTFT", times)
        return [row | {f"device_tokens_{name}": statistics.median(found) for name, found in device.items()}]

    async def _returning(self, length: int) -> list[dict[str, Any]]:
        history, rounds = self._prompt(length), self._settings.rounds
        new = {number: self._prompt(64) for number in range(-self._settings.warm_up, rounds)}
        answers: dict[TokenClient, list[TokenAnswer]] = {client: [] for client in self.clients.values()}

        async def once(client: TokenClient, number: int) -> float:
            await self._have_saved(client, history)
            await client.empty(tiers=False)
            answer = await client.ask([*history, *new[number]], max_tokens=2)
            if number >= 0:
                answers[client].append(answer)
            return answer.ttft_s

        times = await self._alternate(rounds, once)
        row = paired_row(f"{length} tokens return, 64 are new: TTFT", times)
        with_tier, without = answers[self.clients[TIER]], answers[self.clients[OFF]]
        return [row | _sources(with_tier) | compared(with_tier, without, self._dtype)]

    async def _company(self) -> list[dict[str, Any]]:
        """TBT of others: alone, and while a returning request's history comes back.

        Without the tier it is computed, and nobody decodes meanwhile (SGLang runs prefills first): one long gap. What a
        restored one computes afterwards holds up the others as a hit on the device does, without any tier: not counted.
        It is one token behind whole chunks, in both cases.
        """
        length = self._settings.long_history // CHUNK_TOKENS * CHUNK_TOKENS
        history = self._prompt(length + 1)
        gaps: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside": []} for name in self.clients}
        restored: list[int] = []
        for number in range(self._settings.rounds):
            for name in in_turn(self.clients, number):
                client = self.clients[name]
                await self._have_saved(client, history)
                hit_s = (await client.ask(history, max_tokens=1, is_compared=False)).ttft_s
                await client.empty(tiers=False)
                alone, beside, answer = await self._decode_beside(client, history, hit_s)
                gaps[name]["alone"] += alone
                gaps[name]["beside"] += beside
                if name == TIER:
                    restored.append(answer.sources.restored)
                await self.clients[TIER].settle()
        return company_rows(length, gaps, restored)

    async def _have_saved(self, client: TokenClient, history: list[int]) -> None:
        """All of ``history`` is computed, in pieces: passes right behind each other may find no room in staging."""
        for end in (*range(_PIECE, len(history), _PIECE), len(history)):
            await client.ask(history[:end], max_tokens=1, is_compared=False)
            await client.settle()

    async def _decode_beside(
        self, client: TokenClient, history: list[int], hit_s: float
    ) -> tuple[list[float], list[float], TokenAnswer]:
        """Gaps between tokens of a few requests: alone, and while ``history`` comes back; its answer.

        Args:
            hit_s: time to the first token of ``history`` when it is on the device.
        """

        async def batch() -> list[TokenAnswer]:
            prompts = [self._prompt(_SHORT_PROMPT) for _ in range(_COMPANY)]
            asks = [client.ask(prompt, max_tokens=_COMPANY_TOKENS, is_compared=False) for prompt in prompts]
            return list(await asyncio.gather(*asks))

        began = time.perf_counter()
        alone = [gap for answer in await batch() for gap in answer.gaps_s[_COMPANY_TOKENS // 4 :]]
        took = time.perf_counter() - began
        began = time.perf_counter()
        stream = asyncio.create_task(batch())
        await asyncio.sleep(0.3 * took)  # all of them decode by now
        asked = time.perf_counter()
        answer = await client.ask(history, max_tokens=1, is_compared=False)
        came_back = max(asked, asked + answer.ttft_s - hit_s)
        others = await stream
        beside = [
            gap
            for other in others
            for gap in gaps_within(began + other.ttft_s, other.gaps_s, asked, came_back)
        ]
        return alone, beside, answer


def _sources(answers: Sequence[TokenAnswer]) -> dict[str, float]:
    """Tokens of a prompt that came back, and from where: medians."""
    return {
        f"{name}_tokens": statistics.median(getattr(answer.sources, name) for answer in answers)
        for name in ("restored", "host", "disk")
    }


def compared(
    answers: Sequence[TokenAnswer], expected: Sequence[TokenAnswer], dtype: str
) -> dict[str, float | None]:
    """How many answers differ. They are ``unequal``, which is an error, in float32 only: elsewhere rounding alone may
    make it, the more so with dummy weights, to which most tokens are equally probable.
    """
    is_exact = dtype == EXACT.dtype
    allowed = (EXACT if is_exact else FINEST_ON_GPU).logprob_tolerance
    found = [compare(one, other, allowed) for one, other in zip(answers, expected, strict=True)]
    differ = sum(not item.is_equal for item in found)
    return {
        "compared": len(found),
        "differ": differ,
        "ties": sum(item.is_tie for item in found),
        "largest_logprob_difference": max(item.logprob for item in found),
        "unequal": differ if is_exact else None,
    }


def gaps_within(first: float, gaps: Sequence[float], begin: float, end: float) -> list[float]:
    """The gaps that overlap [``begin``, ``end``), the last one cut there: what stands still until then is one of them.

    Args:
        first: when the first token came.
    """
    found, at = [], first
    for gap in gaps:
        if at < end and at + gap > begin:
            found.append(min(gap, end - at))
        at += gap
    return found


def company_rows(
    length: int, gaps: dict[str, dict[str, list[float]]], restored: Sequence[int]
) -> list[dict[str, Any]]:
    """TBT beside the return of a history over TBT alone.

    Args:
        length: whole chunks of the history.
        gaps: of each server, ``alone`` and ``beside`` it, in seconds.
        restored: tokens of it, in each round. Of less than the whole nothing is said: it was prefilled beside them.
    """
    least = min(restored)
    is_whole = least >= length
    why_not = {} if is_whole else {"not_measured": f"{least:,} of {length:,} tokens were restored"}
    rows = []
    for statistic, percent in (("p50", 50), ("p99", 99), ("longest", 100)):
        found = {
            name: {when: float(np.percentile(times, percent)) for when, times in of_server.items() if times}
            for name, of_server in gaps.items()
        }
        ratios: dict[str, float | None] = {
            name: value["beside"] / value["alone"] if "beside" in value else None
            for name, value in found.items()
        }
        if not is_whole:
            ratios[TIER] = None
        elif ratios[TIER] is None:
            why_not = {"not_measured": "nobody decoded meanwhile"}
        rows.append(
            {
                "what": f"TBT {statistic} while {length} tokens return, over TBT alone",
                "unit": "x",
                **ratios,
                "restored_tokens": least,
                **why_not,
                "seconds": found,
            }
        )
    return rows


def paired_row(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median of each round's ratio with its 95 % confidence interval.

    A time of 0 says nothing: all tokens of an answer came at once, because this process had to wait for a core.
    """
    rounds = [pair for pair in zip(times[OFF], times[TIER], strict=True) if all(pair)]
    row = {"what": what, "unit": "s", "times": times}
    if not rounds:
        return row | {OFF: None, TIER: None, "not_measured": "tokens came all at once"}
    ratio, low, high = median_with_interval([tier / off for off, tier in rounds])
    offs, tiers = zip(*rounds, strict=True)
    medians = {OFF: statistics.median(offs), TIER: statistics.median(tiers)}
    return row | medians | {"ratio": ratio, "ratio_low": low, "ratio_high": high}
