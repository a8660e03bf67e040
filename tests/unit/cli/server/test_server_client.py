from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_hcache.cli.server import client as client_module
from sglang_hcache.cli.server.answers import AnswerToken, ChatError, Lines, TokenSources
from sglang_hcache.cli.server.client import Message, ServerClient, tls_context
from sglang_hcache.core.errors import ConfigError

MESSAGES = [Message(role="user", content="Hello")]


class Bytewise(httpx.AsyncByteStream):
    def __init__(self, body: bytes) -> None:
        self.body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(len(self.body)):
            yield self.body[at : at + 1]


def _client(handler: Callable[[httpx.Request], httpx.Response]) -> ServerClient:
    return ServerClient("http://server/", transport=httpx.MockTransport(handler))


def _stream(*chunks: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def _piece(content: str | None, *tokens: tuple[str, float]) -> dict[str, Any]:
    logprobs = {"content": [{"token": text, "logprob": value} for text, value in tokens]} if tokens else None
    return {"choices": [{"index": 0, "delta": {"content": content}, "logprobs": logprobs}]}


def _answers_who_has(key: str) -> Callable[[httpx.Request], httpx.Response]:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        return httpx.Response(200, json={"internal_states": [{"hcache": {"saving": False}}]})

    return handler


def test_the_api_key_is_sent() -> None:
    transport = httpx.MockTransport(_answers_who_has("secret"))
    with ServerClient("http://server", api_key="secret", transport=transport) as client:
        assert client.tier_state() == {"saving": False}
    for key, told in ((None, "give its API key"), ("", "give its API key"), ("other", "another key than")):
        client = ServerClient("http://server", api_key=key, transport=transport)
        with client, pytest.raises(ChatError, match=rf"{told}.*--api-key, or in HCACHE_API_KEY") as refused:
            client.tier_state()
        assert "HTTP 401: Unauthorized; " in str(refused.value)


@pytest.mark.parametrize(
    "key", ["secret\r", "secret\n", "sec\x00ret", "secr\u00e9t", "secret\u2028", "secret\x7f"]
)
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key, or HCACHE_API_KEY") as refusal:
        ServerClient("http://server", api_key=key)
    assert "sec" not in str(refusal.value)


AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBgjCCASmgAwIBAgIULuyUU5ry7Mm4/jcZ+TAofhuFbfkwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLaGNhY2hlIHRlc3QwIBcNMjYxMTI4MTEyMzQyWhgPMjEyNjEx
MDQxMTIzNDJaMBYxFDASBgNVBAMMC2hjYWNoZSB0ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAE8GJWQe93DXQ/lcK1u+SEwc/nFryPrFJtvdJC07CtRZkwcWPJ
JCql+FQ7fa5EaS/WClgQzLwjAGf9WA19L6BFkaNTMFEwHQYDVR0OBBYEFEQnWUni
htEkFrdpxpEY2PnjL5TwMB8GA1UdIwQYMBaAFEQnWUnihtEkFrdpxpEY2PnjL5Tw
MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgPnBjUdpPgBZd1eiU
Crb6MAebH/+VlRlmBa9TMvITyeECIFt+bVwCgFq8B01q22Gje7SR8wsVec2QzS8e
YzKmb8ic
-----END CERTIFICATE-----
"""


def test_certificates_of_this_machines_own_authorities_are_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text(AUTHORITY)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    subjects = [authority["subject"] for authority in tls_context().get_ca_certs()]
    assert ((("commonName", "hcache test"),),) in subjects
    assert len(subjects) > 1  # httpx brings more
    assert tls_context().verify_mode is ssl.CERT_REQUIRED


def test_clients_check_certificates_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    context, real = ssl.create_default_context(), httpx.AsyncClient
    monkeypatch.setattr(client_module, "tls_context", lambda: context)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **fields: given.update(fields) or real(**fields))
    ServerClient("https://server").close()
    assert given["verify"] is context


def test_only_line_feeds_end_a_line() -> None:
    lines = Lines()
    assert lines.take("a\u2028b") == []
    assert lines.take("\u2029\x85c\r") == []
    assert lines.take("\n\nd\x0ce\n" + "f") == ["a\u2028b\u2029\x85c", "", "d\x0ce"]
    assert lines.take("\n") == ["f"]


USAGE = {"choices": [], "usage": {"prompt_tokens": 100}}


def test_an_answer_with_line_ends_of_other_kinds() -> None:
    text = "one\u2028two\u2029three\x85four\u20ac"

    def answer(_: httpx.Request) -> httpx.Response:
        chunks = [_piece(text, (text, -0.5)), USAGE]  # not escaped, as SGLang sends them
        lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks]
        body = "".join([*lines, "data: [DONE]\n\n"]).encode()
        return httpx.Response(200, stream=Bytewise(body))

    with _client(answer) as client:
        assert client.ask(MESSAGES, max_tokens=3).text == text


def test_puts_a_stream_together() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url.path == "/v1/chat/completions"
        assert body["messages"] == MESSAGES
        assert (body["temperature"], body["max_completion_tokens"]) == (0, 3)
        details = {"device": 6, "host": 16, "storage": 32, "storage_backend": "hcache"}
        return _stream(
            _piece(""),  # SGLang's first chunk: a role, no token yet
            _piece(" one", (" one", -0.5)),
            _piece(" two three", (" two", -1.0), (" three", -1.5)),
            _piece(None),
            {"choices": [], "usage": None, "sglext": {"cached_tokens_details": details}},
            USAGE,
        )

    with _client(answer) as client:
        result = client.ask(MESSAGES, max_tokens=3)
    assert result.text == " one two three"
    assert result.tokens == (
        AnswerToken(" one", -0.5),
        AnswerToken(" two", -1.0),
        AnswerToken(" three", -1.5),
    )
    assert result.sources == TokenSources(device=6, host=16, disk=32, recomputed=46)
    assert (result.sources.prompt, result.sources.restored) == (100, 48)
    assert 0 < result.ttft_s <= result.total_s


def test_nothing_cached() -> None:
    with _client(lambda _: _stream(_piece(" one", (" one", -0.5)), USAGE)) as client:
        assert client.ask(MESSAGES, max_tokens=1).sources == TokenSources(
            device=0, host=0, disk=0, recomputed=100
        )


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: httpx.Response(400, text="too long."), "^http://server: HTTP 400: too long$"),
        (lambda: _stream({"error": {"message": "out of memory"}}), "out of memory"),
        (lambda: _stream(_piece(" one", (" one", -0.5))), "early"),
        (lambda: _stream(USAGE), "early"),
        (lambda: httpx.Response(200, text="data: {broken\n\n"), "not JSON"),
    ],
)
def test_a_failure_is_an_error(response: Callable[[], httpx.Response], message: str) -> None:
    with _client(lambda _: response()) as client, pytest.raises(ChatError, match=message):
        client.ask(MESSAGES, max_tokens=1)


def test_no_server() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with _client(refuse) as client:
        with pytest.raises(ChatError, match="refused"):
            client.ask(MESSAGES, max_tokens=1)
        with pytest.raises(ChatError, match="refused"):
            client.tier_state()


@pytest.mark.parametrize("state", [None, {"saving": False}])
def test_tier_state(state: dict[str, Any] | None) -> None:
    internal = {} if state is None else {"hcache": state}
    with _client(lambda _: httpx.Response(200, json={"internal_states": [internal]})) as client:
        assert client.tier_state() == state
        assert client.wait_saved()


def test_wait_saved() -> None:
    saving = iter([True, True, False])

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"internal_states": [{"hcache": {"saving": next(saving, True)}}]})

    with _client(answer) as client:
        assert client.wait_saved()
        assert not client.wait_saved(0.1)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(404, html="<!doctype html>\n<p>\n"), "HTTP 404: a web page"),
        (httpx.Response(200, text="hello"), "does not answer like an SGLang server"),
        (httpx.Response(200, json=[]), "does not answer like an SGLang server"),
        (httpx.Response(200, json={"status": "ok"}), "does not answer like an SGLang server"),
        (httpx.Response(200, json={"internal_states": [None]}), "not that of this version"),
        (httpx.Response(200, json={"internal_states": {"hcache": {}}}), "not that of this version"),
        (httpx.Response(200, json={"internal_states": [{"hcache": 1}]}), "not that of this version"),
    ],
)
def test_a_server_of_another_kind(response: httpx.Response, message: str) -> None:
    with _client(lambda _: response) as client, pytest.raises(ChatError, match=message) as refusal:
        client.tier_state()
    assert "\n" not in str(refusal.value)
