"""Streaming chat over the OpenAI-compatible API, measured: what was answered, when, and from where."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import httpx

from sglang_hcache.core.config import API_KEY_VARIABLE
from sglang_hcache.core.errors import ConfigError, HCacheError

CHAT_PATH = "/v1/chat/completions"
KEEPALIVE_S = 2.0
"""How long an idle connection is used again. SGLang closes them after 5 s: a request that is sent just then is lost."""
_TIMEOUT_S = 300.0
FOREIGN_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
"""What comes of a state that has other parts than that of this version."""
FOREIGN_STATE = "The server answers, but its state is not that of this version of hcache."


class ChatError(HCacheError):
    """The server refused a request, or failed while answering it."""


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


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


def request_body(messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
    """Body of a streaming chat request that reports where the prompt's tokens came from.

    Args:
        fields: further ones, or other values for those that are set here.
    """
    return {
        "model": "default",
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_cached_tokens_details": True,
        **fields,
    }


def authorization(api_key: str | None) -> dict[str, str]:
    """The header by which SGLang knows who may ask; none without a key.

    Raises:
        ConfigError: no header can hold the key. The message does not tell it.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            f"--api-key, or {API_KEY_VARIABLE}: holds characters other than printable ASCII, perhaps a line's end; "
            "such a key cannot be sent"
        )
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def refusal(response: httpx.Response) -> str:
    """What a server said when it refused: status and its own message. The response must have been read."""
    text = response.text.strip()
    if "html" in response.headers.get("content-type", ""):
        text = "a web page, which is no answer of SGLang's"
    with contextlib.suppress(ValueError, TypeError, KeyError):  # what is not SGLang's is shown as it came
        body = response.json()
        said = body if "message" in body else body["error"]
        text = str(said["message"] if isinstance(said, Mapping) else said)
    hint = ""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        is_given = "Authorization" in response.request.headers
        does = "it takes another key than the one given" if is_given else "give its API key"
        hint = f"; {does} as --api-key, or in {API_KEY_VARIABLE}"
    return f"HTTP {response.status_code}: {text}{hint}"


def shown_address(url: str) -> str:
    """``url`` without a user's name and password."""
    return re.sub("//[^/?#]*@", "//", url)


def tls_context() -> ssl.SSLContext:
    """Trusts the certificate authorities that httpx brings, and those of this machine or ``SSL_CERT_FILE``."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context


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


class ChatClient:
    """A client of one server. Requests are greedy and ask for the answer's logprobs.

    Args:
        url: base address of the server, as in ``http://127.0.0.1:30000``.
        api_key: what the server was given as ``--api-key``.
        timeout_s: longest silence of the server within one request, seconds.
        transport: for tests; None for the network.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._shown_url = shown_address(self._url)
        self._http = httpx.Client(
            headers=authorization(api_key),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            timeout=timeout_s,
            trust_env=False,
            verify=tls_context(),
            transport=transport,
        )

    def ask(self, messages: Sequence[Message], *, max_tokens: int) -> ChatAnswer:
        """Send a conversation and read its answer to the end. May be called from several threads.

        Args:
            max_tokens: longest answer, tokens.

        Raises:
            ChatError: the server refused, failed or fell silent.
        """
        body = request_body(messages, temperature=0, logprobs=True, max_completion_tokens=max_tokens)
        reader = StreamReader()
        try:
            with self._http.stream("POST", self._url + CHAT_PATH, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(f"{self._shown_url}: {refusal(response)}")
                lines = Lines()
                for piece in response.iter_text():
                    for line in lines.take(piece):
                        reader.take(line)
        except httpx.HTTPError as error:
            raise ChatError(f"{self._shown_url}: {error!r}") from error
        return reader.answer()

    def tier_state(self) -> dict[str, Any] | None:
        """The tier's counters and sizes, from ``/server_info``; None if the server runs without the tier.

        Raises:
            ChatError: no answer, or none of SGLang's.
        """
        try:
            response = self._http.get(f"{self._url}/server_info")
            if response.is_error:
                raise ChatError(f"{self._shown_url}/server_info: {refusal(response)}")
            states = response.json()["internal_states"]
            state = states[0].get("hcache") if states else None
            return None if state is None else dict(state)
        except httpx.HTTPError as error:
            raise ChatError(f"{self._shown_url}/server_info: {error}") from error
        except FOREIGN_ERRORS as error:
            raise ChatError(
                f"{self._shown_url}/server_info: this is no answer of SGLang's ({error!r})"
            ) from error

    def wait_saved(self, timeout_s: float = 30.0) -> bool:
        """Wait until the tier has nothing left to save; False if it still has after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (state := self.tier_state()) is not None and state["saving"]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
