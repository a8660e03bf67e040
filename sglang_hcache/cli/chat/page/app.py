"""The page's own server, until Ctrl-C. Importing this imports NiceGUI, which is an optional dependency."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nicegui import app, ui
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sglang_hcache.cli.chat.page.answer_html import code_css
from sglang_hcache.cli.chat.page.tab import ChatPage, PageTexts
from sglang_hcache.cli.chat.session import AnswerOptions, Session, Sessions
from sglang_hcache.cli.chat.watch import Watch
from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.server.client import ServerClient

_TITLE = "hcache chat"
_FOLDER = Path(__file__).parent
# Whatever a model writes, an address of a picture say: the browser asks nobody but this page's server, posts nothing
# elsewhere, and shows the page inside no other one.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2f5d8c"/>'
    '<rect x="6" y="8" width="20" height="4" rx="2" fill="#3fb27f"/><rect x="6" y="14" width="20" height="4" rx="2" '
    'fill="#6cc5e0"/><rect x="6" y="20" width="20" height="4" rx="2" fill="#b49be8"/></svg>'
)
_RECONNECT_S = 30.0
"""After that a page that comes back loads anew, with all that was said. A click just before that is lost."""
_OVER_EVERY_S = 0.5
_CLOSING_S = 1  # for connections of open pages, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """What to serve, and where."""

    url: str
    """The SGLang server."""
    host: str
    port: int
    names: tuple[str, ...]
    """Under which browsers may ask for the page; none: any."""
    options: AnswerOptions
    texts: PageTexts
    opens_browser: bool
    api_key: str | None = field(repr=False)
    is_over: Callable[[], bool] = lambda: False
    """Asked again and again; the page ends when there is nothing left to talk to."""

    @property
    def address(self) -> str:
        """The page's."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"


class ChatApp:
    """All browsers' sessions and the one watch of the server."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._sessions = Sessions(lambda: Session(self._server, self._watch, settings.options))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """On the page's event loop."""
        self._server = ServerClient(self._settings.url, api_key=self._settings.api_key)
        self._watch = Watch(self._server)
        self._tasks = [
            asyncio.create_task(work)
            for work in (self._watch.run(), self._first_look(), self._end_when_over())
        ]
        print(
            f"hcache chat: {self._settings.address} talks to {self._server.url}; Ctrl-C ends it", flush=True
        )

    async def stop(self) -> None:
        """Stop all answers, here and at the server."""
        await asyncio.gather(*(session.close() for session in self._sessions))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._server.close)

    def page(self) -> None:
        """Build the page for one tab."""
        ui.add_head_html(f"<script>{(_FOLDER / 'page.js').read_text(encoding='utf-8')}</script>")
        ui.add_css(code_css())
        ui.add_css(_FOLDER / "page.css")
        ChatPage(
            self._sessions.of(str(app.storage.browser["id"])), self._watch, self._settings.texts, self._clear
        )

    async def _first_look(self) -> None:
        """For who has not opened the page yet."""
        try:
            await self._server.info()
        except ChatError as error:
            print(f"hcache chat: warning: {error}. The page tries again", file=sys.stderr, flush=True)

    async def _end_when_over(self) -> None:
        while not self._settings.is_over():
            await asyncio.sleep(_OVER_EVERY_S)
        app.shutdown()

    async def _clear(self, session: Session) -> None:
        # The GPU cache is one for everybody.
        asked = [(each, each.conversations.asked()) for each in self._sessions]
        if await session.clear_gpu_cache():
            for each, before in asked:
                each.conversations.cache_cleared(before)


async def _with_policy(request: Request, call_next: RequestResponseEndpoint) -> Response:
    # A header: in the page itself browsers do not heed frame-ancestors.
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = _POLICY
    return response


def run_page(settings: PageSettings) -> None:
    """Serve the page until Ctrl-C, SIGTERM, or nothing is left to talk to. For the main thread, once a process.

    Nothing is written to disk: NiceGUI's file storage is not used, and cookies are signed with a secret that dies
    with the process.
    """
    chat = ChatApp(settings)
    app.middleware("http")(_with_policy)
    if settings.names:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.names, www_redirect=False)
    app.on_startup(chat.start)
    app.on_shutdown(chat.stop)
    ui.page("/", title=_TITLE)(lambda: chat.page())
    with contextlib.suppress(KeyboardInterrupt):
        ui.run(
            host=settings.host,
            port=settings.port,
            title=_TITLE,
            favicon=_FAVICON,
            dark=None,
            language="en-US",
            tailwind=False,
            reload=False,
            show=settings.opens_browser,
            show_welcome_message=False,
            reconnect_timeout=_RECONNECT_S,
            storage_secret=secrets.token_hex(),
            # Cookies are shared between the ports of a host: two pages must not take each other's.
            session_middleware_kwargs={
                "session_cookie": f"hcache-chat-{settings.port}",
                # Not "strict": a link from elsewhere would open the page without its cookie, and the new one would take
                # the place of the old, with all conversations.
                "same_site": "lax",
            },
            timeout_graceful_shutdown=_CLOSING_S,
        )
