"""Streaming requests of token ids to one server, measured token by token."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from sglang_hcache.cli.server.answers import ChatError, Lines, TokenSources
from sglang_hcache.cli.server.client import KEEPALIVE_S
from sglang_hcache.cli.server.process import ServerProcess, ServerProcessError, with_log_end

T = TypeVar("T")

_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 3600.0  # it may wait behind many that are computed
_SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.02
_DEATH_S = 2.0
_LIKELY = 5
"""Tokens whose logprobs are asked for. In 16 bits, rounding puts third ones between two that are equally probable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer:
    """One answer and its measurements."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    likely: tuple[dict[int, float], ...]
    """At each place the most probable tokens and their logprobs; empty where the answer is compared with none."""
    sources: TokenSources
    ttft_s: float
    """From sending the request to the arrival of the first token, seconds."""
    gaps_s: tuple[float, ...]
    """Times between tokens (TBT), one fewer than tokens."""
    total_s: float
    """From sending the request to the end of the answer, seconds."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an answer differs from the one it should equal."""

    is_equal: bool
    is_tie: bool
    """They part at some place where, to each of them, both tokens are equally probable. Not compared beyond."""
    logprob: float
    """Largest difference between logprobs."""


def compare(one: TokenAnswer, other: TokenAnswer, logprob_tolerance: float) -> Comparison:
    """Token by token; greedy answers are equal but for rounding."""
    largest = 0.0
    pairs = zip(one.tokens, one.logprobs, other.tokens, other.logprobs, strict=False)
    for place, (token, logprob, other_token, other_logprob) in enumerate(pairs):
        difference = abs(logprob - other_logprob)
        if not difference <= logprob_tolerance:  # NaN as well
            return Comparison(False, False, math.inf if math.isnan(difference) else difference)
        largest = max(largest, difference)
        if token != other_token:
            # Equal logprobs of different tokens say little: a server that computes another answer may be as sure of it.
            sides = ((one, other_token), (other, token))
            is_tie = all(_is_as_probable(side, place, its, logprob_tolerance) for side, its in sides)
            return Comparison(is_tie, is_tie, largest)
    return Comparison(bool(one.tokens) and len(one.tokens) == len(other.tokens), False, largest)


def _is_as_probable(answer: TokenAnswer, place: int, token: int, tolerance: float) -> bool:
    """Whether ``token`` would have done as well as the one that ``answer`` has at ``place``."""
    logprob = answer.likely[place].get(token, -math.inf)
    return abs(logprob - answer.logprobs[place]) <= tolerance


class TokenClient:
    """A client of one server's ``/generate``. Requests are greedy and ask for logprobs.

    The server must run with ``--incremental-streaming-output``. Any number of requests may be in flight.
    """

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEPALIVE_S
        )
        self._url = url
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=limits)

    async def ask(self, prompt: Sequence[int], *, max_tokens: int, is_compared: bool = True) -> TokenAnswer:
        """Send ``prompt`` and read an answer of exactly ``max_tokens`` tokens.

        Args:
            is_compared: ask for what :func:`compare` needs. It takes the server's time, in each pass.

        Raises:
            ChatError: the server refused, failed or fell silent.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": _LIKELY if is_compared else 0,
            "stream": True,
        }
        reader = _Reader()
        try:
            timeout = httpx.Timeout(_TIMEOUT_S, read=_ANSWER_TIMEOUT_S)
            url = f"{self._url}/generate"
            async with self._http.stream("POST", url, json=body, timeout=timeout) as response:
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace")
                    raise ChatError(f"{self._url}: HTTP {response.status_code}: {text}")
                lines = Lines()
                async for piece in response.aiter_text():
                    for line in lines.take(piece):
                        reader.take(line)
        except httpx.HTTPError as error:
            raise ChatError(f"{self._url}: {error!r}") from error
        return reader.answer()

    async def settle(self) -> None:
        """Wait until the tier has nothing left to save; returns at once where there is no tier.

        Raises:
            ChatError: it takes too long.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (state := await self.tier_state()) is not None and state["saving"]:
            if time.monotonic() > deadline:
                raise ChatError(f"{self._url}: still saving after {_SETTLE_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def empty(self, *, tiers: bool) -> None:
        """Forget everything: the device tree and, if ``tiers``, what the tiers hold.

        Raises:
            ChatError: the server refuses.
        """
        await self.settle()
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while (await self._post("/flush_cache")).is_error:  # refused while a request is being cleaned up
            if time.monotonic() > deadline:
                raise ChatError(f"{self._url}/flush_cache: refused for {_SETTLE_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)
        if tiers:
            await self.settle()
            response = await self._post("/hicache/storage-backend/clear")
            if response.is_error:
                raise ChatError(f"{response.url}: HTTP {response.status_code}: {response.text}")
        await self.settle()

    async def tier_state(self) -> dict[str, Any] | None:
        """The tier's counters and sizes, from ``/server_info``; None without a tier.

        Raises:
            ChatError: no answer.
        """
        try:
            response = await self._http.get(f"{self._url}/server_info")
            states = response.raise_for_status().json()["internal_states"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ChatError(f"{self._url}/server_info: {error!r}") from error
        state: dict[str, Any] | None = states[0].get("hcache") if states else None
        return state

    async def _post(self, path: str) -> httpx.Response:
        try:
            return await self._http.post(self._url + path)
        except httpx.HTTPError as error:
            raise ChatError(f"{self._url}{path}: {error!r}") from error

    async def __aenter__(self) -> TokenClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def ask_servers(
    servers: Mapping[str, ServerProcess], ask: Callable[[dict[str, TokenClient]], Awaitable[T]]
) -> T:
    """What ``ask`` finds out with a client for each server, in an event loop of its own.

    Raises:
        ServerProcessError: a server died meanwhile.
        ChatError: one refused a request, or failed while answering it.
    """

    async def connected() -> T:
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(TokenClient(server.url))
                for name, server in servers.items()
            }
            return await ask(clients)

    try:
        return asyncio.run(connected())
    except ChatError:
        _tell_who_died(servers)
        raise


def _tell_who_died(servers: Mapping[str, ServerProcess]) -> None:
    """
    Raises:
        ServerProcessError: a server's process is over, or soon is: its connections end a moment earlier.
    """
    deadline = time.monotonic() + _DEATH_S
    while True:
        for name, server in servers.items():
            if not server.is_running:
                raise ServerProcessError(with_log_end(f"{name}: the server died", server.log_text()))
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


class _Reader:
    """Puts the events of one stream together. Time runs from its construction."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._arrivals: list[float] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._likely: list[dict[int, float]] = []
        self._meta: dict[str, Any] = {}

    def take(self, line: str) -> None:
        """One line of the stream of server-sent events.

        Raises:
            ChatError: the server reports a failure, or sends what is no JSON.
        """
        field, _, data = line.partition(":")
        if field != "data" or data.strip() == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ChatError(f"the server sent something that is not JSON: {data[:200]!r}") from None
        if "error" in event:
            raise ChatError(f"the server failed while answering: {event['error']}")
        self._meta = event["meta_info"]
        fresh = self._meta.get("output_token_logprobs") or ()
        now = time.perf_counter()
        before = self._arrivals[-1] if self._arrivals else now
        for number, (logprob, token, *_) in enumerate(fresh, start=1):
            # Tokens that arrive together were made one after the other.
            self._arrivals.append(before + (now - before) * number / len(fresh))
            self._tokens.append(token)
            self._logprobs.append(logprob)
        best = self._meta.get("output_top_logprobs") or [()] * len(fresh)
        for _, likely in zip(fresh, best, strict=True):
            self._likely.append({token: logprob for logprob, token, *_ in likely or ()})

    def answer(self) -> TokenAnswer:
        """The whole answer.

        Raises:
            ChatError: the stream ended before the answer did.
        """
        total_s = time.perf_counter() - self._began
        if not self._tokens or len(self._tokens) != self._meta.get("completion_tokens"):
            raise ChatError("the server ended its answer early")
        details = self._meta.get("cached_tokens_details") or {}
        device, host, disk = (int(details.get(name) or 0) for name in ("device", "host", "storage"))
        arrivals = self._arrivals
        return TokenAnswer(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            likely=tuple(self._likely),
            sources=TokenSources(
                device=device,
                host=host,
                disk=disk,
                recomputed=self._meta["prompt_tokens"] - device - host - disk,
            ),
            ttft_s=arrivals[0] - self._began,
            gaps_s=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
            total_s=total_s,
        )
