"""The page's requests, and what one browser's session makes of their answers. No network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from sglang_hcache.cli.chat.conversation import Phase
from sglang_hcache.cli.chat.session import AnswerOptions, Session
from sglang_hcache.cli.chat.watch import Look, Reach, Watch, look_of
from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.server.client import ServerClient, SilentError, UnreachableError
from sglang_hcache.core.layout import Method
from tests.unit.cli.test_top import state

Handler = Callable[[httpx.Request], httpx.Response]


class Pieces(httpx.AsyncByteStream):
    """A stream that waits for ``go`` before its last pieces; knows whether it was closed. Read on another thread."""

    def __init__(self, first: list[bytes], rest: list[bytes]) -> None:
        self.first, self.rest = first, rest
        self.go = threading.Event()
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.first:
            yield piece
        while not self.go.is_set():
            await asyncio.sleep(0.001)
        for piece in self.rest:
            yield piece

    async def aclose(self) -> None:
        self.is_closed = True


def line(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def token(text: str, count: int) -> bytes:
    usage = {"prompt_tokens": 9, "completion_tokens": count}
    return line({"choices": [{"delta": {"content": text}}], "usage": usage})


DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def server_of(handler: Handler, **options: Any) -> AsyncIterator[ServerClient]:
    with ServerClient("http://there/", transport=httpx.MockTransport(handler), **options) as server:
        yield server


def fails_with(error: type[httpx.TransportError]) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error("no", request=request)

    return handler


@contextlib.asynccontextmanager
async def session_of(handler: Handler, **options: Any) -> AsyncIterator[Session]:
    async with server_of(handler) as server:
        session = Session(server, Watch(server), AnswerOptions(**options))
        yield session
        await session.close()


async def texts_of(server: ServerClient, **fields: Any) -> list[str]:
    texts: list[str] = []
    await server.answer([], lambda reader: texts.append(reader.text), **fields)
    return texts


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_an_answer() -> None:
    seen: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, content=token("Hel", 1) + token("lo", 2) + DONE)

    async def run() -> None:
        async with session_of(handler, max_tokens=7, system="Be brief.") as session:
            conversation = session.conversations.selected
            assert session.send(conversation, "\nHi \n")
            assert not session.send(conversation, "again")  # one answer at a time
            await until(lambda: conversation.open_exchange is None)
            (exchange,) = conversation.exchanges
            assert (exchange.question, exchange.answer, exchange.phase) == ("Hi", "Hello", Phase.DONE)
            assert exchange.measures is not None
            assert exchange.measures.sources is not None
            assert exchange.measures.sources.recomputed == 9
            assert not session.send(conversation, "  ")

    asyncio.run(run())
    assert [message["content"] for message in seen[0]["messages"]] == ["Be brief.", "Hi"]
    assert seen[0]["max_completion_tokens"] == 7
    assert "temperature" not in seen[0]
    assert seen[0]["return_cached_tokens_details"]


def test_temperature_is_sent_when_given() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["temperature"] == 0.0
        return httpx.Response(200, content=token("a", 1) + DONE)

    async def run() -> None:
        async with server_of(handler) as server:
            assert (await texts_of(server, **AnswerOptions(temperature=0.0).fields()))[-1] == "a"

    asyncio.run(run())


def test_stop_closes_the_request_and_keeps_what_came() -> None:
    async def run() -> None:
        body = Pieces([token("one", 1)], [token(" two", 2), DONE])
        async with session_of(lambda _: httpx.Response(200, stream=body)) as session:
            conversation = session.conversations.selected
            session.send(conversation, "Count")
            await until(lambda: conversation.exchanges[0].answer == "one")
            session.stop(conversation)
            await until(lambda: conversation.open_exchange is None)
            await until(lambda: body.is_closed)  # on another thread, a moment later
            exchange = conversation.exchanges[0]
            assert (exchange.answer, exchange.phase) == ("one", Phase.STOPPED)
            assert exchange.measures is not None
            assert exchange.measures.num_tokens == 1
            session.stop(conversation)  # nothing to stop

    asyncio.run(run())


def test_two_answers_at_once_and_one_is_deleted() -> None:
    async def run() -> None:
        bodies = [Pieces([token("a", 1)], [DONE]), Pieces([token("b", 1)], [DONE])]
        left = iter(bodies)
        async with session_of(lambda _: httpx.Response(200, stream=next(left))) as session:
            first = session.conversations.selected
            session.send(first, "one")
            second = session.conversations.new()
            session.send(second, "two")
            await until(lambda: first.exchanges[0].answer == "a" and second.exchanges[0].answer == "b")
            bodies[0].go.set()
            await until(lambda: first.open_exchange is None)
            await until(lambda: first.is_unread)
            session.delete(second)
            await until(lambda: bodies[1].is_closed)
            assert list(session.conversations) == [first]
            await session.close()

    asyncio.run(run())


def test_a_server_that_dies_and_comes_back() -> None:
    answers = iter(
        [
            httpx.Response(200, content=token("half", 1)),  # the stream just ends
            fails_with(httpx.ConnectError),
            httpx.Response(200, content=token("whole", 1) + DONE),
        ]
    )

    def handler(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        return answer if isinstance(answer, httpx.Response) else answer(request)

    async def run() -> None:
        async with session_of(handler) as session:
            conversation = session.conversations.selected
            session.send(conversation, "Hi")
            await until(lambda: conversation.open_exchange is None)
            (exchange,) = conversation.exchanges
            assert (exchange.phase, exchange.answer) == (Phase.FAILED, "half")
            assert "early" in exchange.error
            session.retry(conversation, exchange)
            await until(lambda: conversation.open_exchange is None)
            assert (exchange.phase, exchange.answer) == (Phase.FAILED, "")
            assert "cannot be reached" in exchange.error
            session.retry(conversation, exchange)
            await until(lambda: conversation.open_exchange is None)
            assert (exchange.phase, exchange.answer, exchange.error) == (Phase.DONE, "whole", "")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("handler", "kind", "said"),
    [
        (fails_with(httpx.ConnectError), UnreachableError, "cannot be reached"),
        (fails_with(httpx.ReadTimeout), SilentError, "in time"),
        (fails_with(httpx.RemoteProtocolError), ChatError, "broke"),
    ],
)
def test_failures_are_said(handler: Handler, kind: type[ChatError], said: str) -> None:
    async def run() -> None:
        async with server_of(handler) as server:
            with pytest.raises(kind, match=said):
                await texts_of(server)

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 400])
def test_clearing_the_gpu_cache(status: int) -> None:
    async def run() -> None:
        def handler(request: httpx.Request) -> httpx.Response:
            assert (request.method, request.url.path) == ("POST", "/flush_cache")
            return httpx.Response(status, text="Flush cache failed.\n")

        async with session_of(handler) as session:
            assert await session.clear_gpu_cache() == (status == 200)
            assert session.notice.is_error == (status == 400)
            assert ("Flush cache failed." in session.notice.text) == (status == 400)
            assert "tier" not in session.notice.text, "nothing is known of one"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("handler", "said", "is_running"),
    [
        (lambda _: httpx.Response(400, text="Flush cache failed."), "Flush cache failed.", True),
        (lambda _: httpx.Response(401, json={"message": "Unauthorized"}), "Unauthorized", False),
        (lambda _: httpx.Response(500, text="broken"), "broken", False),
        (fails_with(httpx.ReadTimeout), "in time", False),
        (fails_with(httpx.ConnectError), "cannot be reached", False),
    ],
)
def test_why_the_gpu_cache_was_not_cleared(handler: Handler, said: str, is_running: bool) -> None:
    async def run() -> None:
        async with session_of(handler) as session:
            assert not await session.clear_gpu_cache()
            assert said in session.notice.text
            assert ("while requests run" in session.notice.text) == is_running
            assert ".." not in session.notice.text

    asyncio.run(run())


@pytest.mark.parametrize("api_key", ["secret", None])
def test_a_server_with_an_admin_key_takes_that_to_clear_its_gpu_cache(api_key: str | None) -> None:
    """With or without an API key: no other key helps."""
    transport = httpx.MockTransport(lambda _: httpx.Response(401, json={"error": "Unauthorized"}))

    async def told() -> str:
        with ServerClient("http://server", api_key=api_key, transport=transport) as server:
            session = Session(server, Watch(server), AnswerOptions())
            assert not await session.clear_gpu_cache()
        return session.notice.text

    assert asyncio.run(told()) == (
        "The GPU cache was not cleared. HTTP 401: Unauthorized. If the server has an admin key, it takes only that for "
        "this: curl -X POST http://server/flush_cache -H 'Authorization: Bearer ADMIN_KEY'"
    )


def info(tier: dict[str, Any] | None) -> dict[str, Any]:
    return {"internal_states": [{} if tier is None else {"hcache": tier}], "served_model_name": "dir/name"}


def test_the_watch_looks_and_looks_again() -> None:
    is_up = True

    def handler(request: httpx.Request) -> httpx.Response:
        if not is_up:
            return fails_with(httpx.ConnectError)(request)
        assert request.url.path == "/server_info"
        return httpx.Response(200, json=info(state()))

    async def run() -> None:
        nonlocal is_up
        async with server_of(handler) as server:
            watch = Watch(server)
            task = asyncio.create_task(watch.run())
            await asyncio.sleep(0)
            assert watch.look == Look()  # nobody looks
            watch.seen()
            await until(lambda: watch.look.reach is Reach.UP)
            assert watch.look.model == "name"
            assert watch.look.layers == (Method.KV, Method.HIDDEN)
            is_up = False
            watch.hurry()
            await until(lambda: watch.look.reach is Reach.AWAY)
            assert "cannot be reached" in watch.look.problem
            assert watch.look.tier == state()  # of before
            is_up = True
            watch.hurry()
            await until(lambda: watch.look.reach is Reach.UP)
            assert watch.look.problem == ""
            task.cancel()

    asyncio.run(run())


FOREIGN: list[Any] = [
    [{"hcache": {**state(), "layers": ["kv", "of_tomorrow"]}}],
    [{"hcache": {}}],
    [{"hcache": 1}],
    [None],
    {"hcache": {}},
]


@pytest.mark.parametrize("states", FOREIGN)
def test_the_watch_outlives_a_state_of_another_version(states: Any) -> None:
    answers = {"internal_states": states}

    async def run() -> None:
        async with server_of(lambda _: httpx.Response(200, json=answers)) as server:
            watch = Watch(server)
            task = asyncio.create_task(watch.run())
            watch.seen()
            await until(lambda: watch.look.reach is Reach.AWAY)
            assert "not that of this version" in watch.look.problem
            answers.update(info(state()))
            watch.hurry()
            await until(lambda: watch.look.reach is Reach.UP)
            task.cancel()

    asyncio.run(run())


def test_what_cannot_be_reached_is_told_with_its_cause_and_without_a_password() -> None:
    asked = []

    def refuses(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ConnectError("certificate verify failed", request=request)

    with ServerClient("http://me:pa55@there/", transport=httpx.MockTransport(refuses)) as server:
        assert server.url == "http://there"
        with pytest.raises(UnreachableError) as error:
            server.tier_state()
    assert str(error.value) == "http://there cannot be reached: certificate verify failed"
    assert asked[0].headers["Authorization"].startswith("Basic ")  # of use to a proxy


def test_a_server_without_the_tier() -> None:
    look = look_of(info(None))
    assert (look.reach, look.tier, look.layers) == (Reach.UP, None, ())
