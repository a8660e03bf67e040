"""How the page of ``hcache chat`` is served."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from sglang_hcache.cli.chat.client import AnswerOptions
from sglang_hcache.cli.chat.page import app as module
from sglang_hcache.cli.chat.page.tab import PageTexts


def test_a_link_from_elsewhere_finds_the_conversations_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers send a strict cookie with no request that begins on another site."""
    ui = MagicMock()
    monkeypatch.setattr(module, "ui", ui)
    monkeypatch.setattr(module, "app", MagicMock())
    module.run_page(
        module.PageSettings(
            url="http://server",
            host="127.0.0.1",
            port=8088,
            names=(),
            options=AnswerOptions(),
            texts=PageTexts(starters=(), note=""),
            opens_browser=False,
            api_key=None,
        )
    )
    cookie = ui.run.call_args.kwargs["session_middleware_kwargs"]
    assert cookie == {"session_cookie": "hcache-chat-8088", "same_site": "lax"}
