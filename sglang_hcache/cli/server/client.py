"""Requests to a server: chat over the OpenAI-compatible API, its state, and clearing its GPU cache."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import httpx

from sglang_hcache.cli.server.answers import ChatAnswer, ChatError, Lines, StreamReader
from sglang_hcache.core.config import API_KEY_VARIABLE
from sglang_hcache.core.errors import ConfigError

CHAT_PATH = "/v1/chat/completions"
_FLUSH_PATH = "/flush_cache"
KEEPALIVE_S = 2.0
"""How long an idle connection is used again. SGLang closes them after 5 s: a request that is sent just then is lost."""
_SILENCE_S = 300.0  # within an answer: a long prompt may wait behind others
_CONNECT_S = 5.0
_LOOK_S = 5.0  # a busy scheduler answers between two batches
_FLUSH_S = 60.0
FOREIGN_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
"""What comes of a state that has other parts than that of this version."""
FOREIGN_STATE = "The server answers, but its state is not that of this version of hcache"
_T = TypeVar("_T")


class UnreachableError(ChatError):
    """Nobody listens at the server's address."""


class SilentError(ChatError):
    """The server took the request and did not answer in time: it may be busy."""


class RefusalError(ChatError):
    """The server answered with an error.

    Args:
        status: of HTTP.
    """

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


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
    """What a server said when it refused: status and its own message. The response must have been read.

    To clear its cache it may take another key than its API key: who asks for that says so.
    """
    text = response.text.strip()
    if "html" in response.headers.get("content-type", ""):
        text = "a web page, which is no answer of SGLang's"
    with contextlib.suppress(ValueError, TypeError, KeyError):  # what is not SGLang's is shown as it came
        body = response.json()
        said = body if "message" in body else body["error"]
        text = str(said["message"] if isinstance(said, Mapping) else said)
    hint = ""
    is_flush = response.request.url.path.endswith(_FLUSH_PATH)
    if response.status_code == httpx.codes.UNAUTHORIZED and not is_flush:
        is_given = "Authorization" in response.request.headers
        does = "it takes another key than the one given" if is_given else "give its API key"
        hint = f"; {does} as --api-key, or in {API_KEY_VARIABLE}"
    return f"HTTP {response.status_code}: {text.removesuffix('.')}{hint}"


def shown_address(url: str) -> str:
    """``url`` without a user's name and password."""
    return re.sub("//[^/?#]*@", "//", url)


def tls_context() -> ssl.SSLContext:
    """Trusts the certificate authorities that httpx brings, and those of this machine or ``SSL_CERT_FILE``."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context


class ServerClient:
    """A client of one server, for commands, which wait for it, and for the page, which must not.

    Requests run on a thread of their own: times must not depend on how long the page takes to draw itself.

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
        timeout_s: float = _SILENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self.url = shown_address(self._url)
        """Base address, as it may be shown."""
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            headers=authorization(api_key),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=4, keepalive_expiry=KEEPALIVE_S
            ),
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            trust_env=False,
            verify=tls_context(),
            transport=transport,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hcache-requests", daemon=True)
        self._thread.start()

    # -- for commands ----------------------------------------------------------------------------

    def ask(self, messages: Sequence[Message], *, max_tokens: int) -> ChatAnswer:
        """Send a conversation and read its greedy answer to the end. May be called from several threads.

        Args:
            max_tokens: longest answer, tokens.

        Raises:
            ChatError: the server refused, failed or fell silent.
        """
        body = request_body(messages, temperature=0, logprobs=True, max_completion_tokens=max_tokens)
        return self._wait(self._stream(body, lambda _: None)).answer()

    def tier_state(self) -> dict[str, Any] | None:
        """The tier's counters and sizes, from ``/server_info``; None if the server runs without the tier.

        Raises:
            ChatError: no answer, or none of SGLang's.
        """
        try:
            return tier_of(self._wait(self._info(self._timeout_s)))
        except FOREIGN_ERRORS as error:
            raise ChatError(f"{self.url}: {FOREIGN_STATE} ({error!r})") from error

    def wait_saved(self, timeout_s: float = 30.0) -> bool:
        """Wait until the tier has nothing left to save; False if it still has after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (state := self.tier_state()) is not None and state["saving"]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    # -- for the page ----------------------------------------------------------------------------

    async def answer(
        self, messages: Sequence[Message], on_piece: Callable[[StreamReader], None], **fields: Any
    ) -> None:
        """Ask for one answer and read it to its end. Cancelling it aborts the request at the server.

        Args:
            on_piece: called on this loop after every line that came; perhaps once more after a cancellation.
            fields: of the request.

        Raises:
            ChatError: the server refused, failed, fell silent or cannot be reached.
        """
        here = asyncio.get_running_loop()
        # With counts in every chunk, also an answer that is stopped has them.
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body = request_body(messages, stream_options=usage, **fields)
        reader = await self._elsewhere(
            self._stream(body, lambda reader: here.call_soon_threadsafe(on_piece, reader))
        )
        if not reader.is_whole:
            raise ChatError("the server ended its answer early")

    async def info(self) -> Mapping[str, Any]:
        """``/server_info``.

        Raises:
            UnreachableError: nobody listens.
            SilentError: no answer in time.
            ChatError: another answer than that of SGLang.
        """
        return await self._elsewhere(self._info(_LOOK_S))

    async def clear_gpu_cache(self) -> None:
        """Drop the KV cache of all conversations on the device. What the tier keeps stays; what is in host memory
        only is written to disk.

        Raises:
            RefusalError: the server refused; with status 400 while requests run, and 401 without its key.
            ChatError: no answer.
        """
        await self._elsewhere(self._request("POST", _FLUSH_PATH, _FLUSH_S))

    # -- requests --------------------------------------------------------------------------------

    async def _elsewhere(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What ``work`` gives on the thread for requests. A cancellation reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The same, for who may wait. A refusal says of which server: a command may ask two."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RefusalError as error:
            raise RefusalError(f"{self.url}: {error}", error.status) from error

    async def _stream(
        self, body: Mapping[str, Any], on_piece: Callable[[StreamReader], object]
    ) -> StreamReader:
        reader = StreamReader()
        try:
            async with self._http.stream("POST", self._url + CHAT_PATH, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise RefusalError(refusal(response), response.status_code)
                lines = Lines()
                async for piece in response.aiter_text():
                    for line in lines.take(piece):
                        reader.take(line)
                        on_piece(reader)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        return reader

    async def _info(self, timeout_s: float) -> Mapping[str, Any]:
        response = await self._request("GET", "/server_info", timeout_s)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            info = dict(response.json())
            if info["internal_states"]:
                return info
        raise ChatError(f"{self.url} does not answer like an SGLang server")

    async def _request(self, method: str, path: str, timeout_s: float) -> httpx.Response:
        try:
            response = await self._http.request(method, self._url + path, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        if response.is_error:
            raise RefusalError(refusal(response), response.status_code)
        return response

    def _failure(self, error: httpx.HTTPError) -> ChatError:
        """What went wrong on the way, for people."""
        why = f": {error}" if str(error) else ""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return UnreachableError(f"{self.url} cannot be reached{why}")
        if isinstance(error, httpx.TimeoutException):
            return SilentError(f"{self.url} did not answer in time")
        return ChatError(f"{self.url}: the connection broke{why}")

    # -- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End whatever is on its way, and close the connections. Once."""
        self._wait(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tier_of(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tier's state in ``/server_info``; None without the tier. Raises :data:`FOREIGN_ERRORS`."""
    state = info["internal_states"][0].get("hcache")
    return None if state is None else dict(state)
