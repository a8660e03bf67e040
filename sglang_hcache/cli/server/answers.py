"""What a server says of an answer while it streams: text, tokens, times, and where the prompt came from."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.errors import HCacheError


class ChatError(HCacheError):
    """The server refused a request, or failed while answering it."""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSources:
    """Where the state of a prompt's tokens came from. The four add up to the prompt."""

    device: int
    host: int
    disk: int
    recomputed: int

    @property
    def prompt(self) -> int:
        return self.device + self.host + self.disk + self.recomputed

    @property
    def restored(self) -> int:
        """Tokens from either tier."""
        return self.host + self.disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer and its measurements."""

    text: str
    tokens: tuple[AnswerToken, ...]
    sources: TokenSources
    ttft_s: float
    """From sending the request to the arrival of the first token, seconds."""
    total_s: float
    """From sending the request to the end of the answer, seconds."""


class Lines:
    """Lines of a stream of server-sent events that comes in pieces.

    Only a line feed ends one here. httpx also takes U+2028 and others for line ends, which SGLang does not escape in an
    answer.
    """

    def __init__(self) -> None:
        self._begun = ""

    def take(self, piece: str) -> list[str]:
        """The lines that ``piece`` ends. What follows the last line feed is no line yet."""
        *lines, self._begun = (self._begun + piece).split("\n")
        return [line.removesuffix("\r") for line in lines]


class StreamReader:
    """Puts the chunks of one stream together. Time runs from its construction."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._tokens: list[AnswerToken] = []
        self._prompt_tokens: int | None = None
        self._details: dict[str, Any] = {}
        self._is_whole = False
        self.ttft_s: float | None = None
        """From its construction to the first token, seconds; None before."""
        self.latest_s: float | None = None
        """From its construction to the latest piece of the answer, seconds; None before the first."""
        self.num_tokens: int | None = None
        """Tokens of the answer so far; None if the server did not say yet."""
        self.finish_reason = ""
        """Why the answer ended, in the server's word: ``stop``, ``length`` and others. Empty before."""

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def is_whole(self) -> bool:
        """Whether the server sent its end mark."""
        return self._is_whole

    @property
    def thoughts(self) -> str:
        """What a server with a reasoning parser keeps apart from the answer."""
        return "".join(self._thoughts)

    @property
    def sources(self) -> TokenSources | None:
        """Where the prompt came from; None until the end of the stream, where servers say it."""
        if not self._is_whole or self._prompt_tokens is None:
            return None
        device, host, disk = (int(self._details.get(name) or 0) for name in ("device", "host", "storage"))
        recomputed = self._prompt_tokens - device - host - disk
        return TokenSources(device=device, host=host, disk=disk, recomputed=recomputed)

    def take(self, line: str) -> None:
        """One line of the stream of server-sent events.

        Raises:
            ChatError: the server reports a failure, or sends what is no JSON.
        """
        field, _, data = line.partition(":")
        if field != "data":
            return
        if data.strip() == "[DONE]":
            self._is_whole = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ChatError(f"the server sent something that is not JSON: {data[:200]!r}") from None
        if "error" in chunk:
            raise ChatError(f"the server failed while answering: {_message(chunk['error'])}")
        for choice in chunk.get("choices") or ():
            self._take_choice(choice)
        if usage := chunk.get("usage"):
            self._prompt_tokens = int(usage["prompt_tokens"])
            self.num_tokens = int(usage.get("completion_tokens") or 0)
        # SGLang's extension; absent when nothing came from a cache.
        self._details = (chunk.get("sglext") or {}).get("cached_tokens_details") or self._details

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        content, thoughts = delta.get("content") or "", delta.get("reasoning_content") or ""
        logprobs = (choice.get("logprobs") or {}).get("content") or ()
        if content or thoughts or logprobs:
            self.latest_s = time.perf_counter() - self._began
            self.ttft_s = self.ttft_s or self.latest_s
        self._text.append(content)
        self._thoughts.append(thoughts)
        self._tokens += [AnswerToken(token["token"], token["logprob"]) for token in logprobs]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def answer(self) -> ChatAnswer:
        """The whole answer.

        Raises:
            ChatError: the stream ended without a token, without its usage or before its end.
        """
        total_s = time.perf_counter() - self._began
        sources = self.sources
        if self.ttft_s is None or sources is None:
            raise ChatError("the server ended its answer early")
        return ChatAnswer(
            text=self.text,
            tokens=tuple(self._tokens),
            sources=sources,
            ttft_s=self.ttft_s,
            total_s=total_s,
        )


def _message(error: Any) -> str:
    """The text of a failure inside a stream."""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
