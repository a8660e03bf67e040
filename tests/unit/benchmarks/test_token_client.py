"""What the benchmarks' client makes of a server's stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from sglang_hcache.cli.server.answers import ChatError

Import = Callable[[str], Any]


def asked(bench: Import, body: str) -> Any:
    """The answer to a request of one token, from a server that sends ``body`` byte by byte."""

    async def pieces() -> AsyncIterator[bytes]:
        for byte in body.encode():
            yield bytes([byte])

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))

    async def ask() -> Any:
        async with bench("serving.token_client").TokenClient("http://server") as client:
            await client._http.aclose()
            client._http = httpx.AsyncClient(transport=transport)
            return await client.ask([1, 2, 3], max_tokens=1)

    return asyncio.run(ask())


def test_an_answer_with_line_ends_of_other_kinds(bench: Import) -> None:
    event = {
        "text": "one\u2028two\u2029three\x85four",
        "meta_info": {
            "output_token_logprobs": [[-0.5, 7, None]],
            "completion_tokens": 1,
            "prompt_tokens": 3,
        },
    }
    body = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n"  # not escaped, as SGLang sends it
    answer = asked(bench, body)
    assert (answer.tokens, answer.logprobs) == ((7,), (-0.5,))
    assert answer.sources.recomputed == 3


def test_what_is_no_json_is_told(bench: Import) -> None:
    with pytest.raises(ChatError, match=r"not JSON: .*oops"):
        asked(bench, "data: {oops\n\ndata: [DONE]\n\n")
