"""Requests to the server: answers, its state, and clearing its GPU cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from sglang_hcache.cli.server.client import (
    CHAT_PATH,
    KEEPALIVE_S,
    ChatError,
    Lines,
    Message,
    StreamReader,
    authorization,
    refusal,
    request_body,
    shown_address,
    tls_context,
)

_SILENCE_S = 300.0  # within an answer: a long prompt may wait behind others
_CONNECT_S = 5.0
_LOOK_S = 5.0  # a busy scheduler answers between two batches
_FLUSH_S = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How answers are asked for."""

    max_tokens: int = 1024
    temperature: float | None = None
    """None: what the model's own configuration says."""
    system: str = ""
    """Sent before every conversation; empty for none."""


class UnreachableError(ChatError):
    """Nobody listens at the server's address."""


class RefusalError(ChatError):
    """The server answered with an error.

    Args:
        status: of HTTP.
    """

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class SilentError(ChatError):
    """The server took the request and did not answer in time: it may be busy."""


class AsyncChatClient:
    """One server, asked without blocking, from any event loop.

    Requests run on a thread of their own: times must not depend on how long the page takes to draw itself.

    Args:
        url: base address, as in ``http://127.0.0.1:30000``.
        options: of every answer.
        api_key: what the server was given as ``--api-key``.
        transport: for tests; None for the network.
    """

    def __init__(
        self,
        url: str,
        options: AnswerOptions,
        *,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self.options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hcache-chat-requests", daemon=True
        )
        self._thread.start()
        self._http = httpx.AsyncClient(
            headers=authorization(api_key),
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=4, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,
            verify=tls_context(),
            transport=transport,
        )

    @property
    def url(self) -> str:
        """Base address, as it may be shown."""
        return shown_address(self._url)

    @property
    def has_key(self) -> bool:
        """Whether requests say a key."""
        return "Authorization" in self._http.headers

    async def answer(self, messages: Sequence[Message], on_piece: Callable[[StreamReader], None]) -> None:
        """Ask for one answer and read it to its end. Cancelling it aborts the request at the server.

        Args:
            on_piece: called on this loop after every line that came; perhaps once more after a cancellation.

        Raises:
            ChatError: the server refused, failed, fell silent or cannot be reached.
        """
        here = asyncio.get_running_loop()
        await self._elsewhere(
            self._answer(messages, lambda reader: here.call_soon_threadsafe(on_piece, reader))
        )

    async def info(self) -> Mapping[str, Any]:
        """``/server_info``.

        Raises:
            UnreachableError: nobody listens.
            SilentError: no answer in time.
            ChatError: another answer than that of SGLang.
        """
        response = await self._elsewhere(self._get("/server_info"))
        try:
            info = dict(response.json())
            is_ready = bool(info["internal_states"])
        except (ValueError, TypeError, KeyError):
            is_ready = False
        if not is_ready:
            raise ChatError(f"{self.url} does not answer like an SGLang server.")
        return info

    async def clear_gpu_cache(self) -> None:
        """Drop the KV cache of all conversations on the device. What the tier keeps stays; what is in host memory
        only is written to disk.

        Raises:
            RefusalError: the server refused; with status 400 while requests run, and 401 where it takes another key.
            ChatError: no answer.
        """
        await self._elsewhere(self._request("POST", "/flush_cache", _FLUSH_S))

    async def close(self) -> None:
        """End whatever is on its way, and close the connections. Once."""
        await self._elsewhere(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    async def _elsewhere(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What ``work`` gives on the thread for requests. A cancellation reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _answer(self, messages: Sequence[Message], on_piece: Callable[[StreamReader], object]) -> None:
        options = self.options
        fields: dict[str, Any] = {} if options.temperature is None else {"temperature": options.temperature}
        body = request_body(
            messages,
            max_completion_tokens=options.max_tokens,
            # With counts in every chunk, also an answer that is stopped has them.
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            **fields,
        )
        reader = StreamReader()
        try:
            async with self._http.stream("POST", self._url + CHAT_PATH, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise ChatError(refusal(response))
                lines = Lines()
                async for piece in response.aiter_text():
                    for line in lines.take(piece):
                        reader.take(line)
                        on_piece(reader)
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        if not reader.is_whole:
            raise ChatError("The server ended its answer early.")

    def _get(self, path: str) -> Coroutine[Any, Any, httpx.Response]:
        return self._request("GET", path, _LOOK_S)

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
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            why = f": {error}" if str(error) else ""
            return UnreachableError(f"{self.url} cannot be reached{why}.")
        if isinstance(error, httpx.TimeoutException):
            return SilentError(f"{self.url} did not answer in time.")
        return ChatError(f"The connection to {self.url} broke.")
