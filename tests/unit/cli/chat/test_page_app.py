"""How the page of ``hcache chat`` is served."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_hcache.cli.chat.page import app as module
from sglang_hcache.cli.chat.page.tab import PageTexts
from sglang_hcache.cli.chat.session import AnswerOptions
from sglang_hcache.cli.server.ports import free_port


def settings(**changes: Any) -> module.PageSettings:
    fields: dict[str, Any] = {
        "url": "http://server",
        "host": "127.0.0.1",
        "port": 8088,
        "names": (),
        "options": AnswerOptions(),
        "texts": PageTexts(starters=(), note=""),
        "opens_browser": False,
        "api_key": None,
    }
    return module.PageSettings(**{**fields, **changes})


def test_a_link_from_elsewhere_finds_the_conversations_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers send a strict cookie with no request that begins on another site."""
    ui = MagicMock()
    monkeypatch.setattr(module, "ui", ui)
    monkeypatch.setattr(module, "app", MagicMock())
    module.run_page(settings())
    cookie = ui.run.call_args.kwargs["session_middleware_kwargs"]
    assert cookie == {"session_cookie": "hcache-chat-8088", "same_site": "lax"}


def test_who_has_not_opened_the_page_yet_is_told_that_nobody_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def run() -> None:
        chat = module.ChatApp(settings(url=url))
        chat.start()
        await asyncio.wait(chat._tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        await chat.stop()

    asyncio.run(run())
    told = capsys.readouterr()
    assert told.out == f"hcache chat: http://127.0.0.1:8088/ talks to {url}; Ctrl-C ends it\n"
    assert told.err.startswith(f"hcache chat: warning: {url} cannot be reached")
    assert told.err.endswith(". The page tries again\n")


def test_the_page_ends_when_there_is_nothing_left_to_talk_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OVER_EVERY_S", 0.001)
    is_over = False

    async def run() -> None:
        nonlocal is_over
        ended = asyncio.Event()
        monkeypatch.setattr(module, "app", MagicMock(shutdown=ended.set))
        chat = module.ChatApp(settings(is_over=lambda: is_over))
        chat.start()
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        is_over = True
        await asyncio.wait_for(ended.wait(), 60)
        await chat.stop()

    asyncio.run(run())
