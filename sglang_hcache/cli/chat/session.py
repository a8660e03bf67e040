"""One browser's conversations and the answers on their way. Lives in memory, and over reloads of the page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from sglang_hcache.cli.chat.conversation import Conversation, Conversations, Exchange, Phase
from sglang_hcache.cli.chat.watch import Watch
from sglang_hcache.cli.server.answers import ChatError, StreamReader
from sglang_hcache.cli.server.client import RefusalError, ServerClient

_STATUS_RUNNING = 400  # of SGLang's /flush_cache, for nothing else
_MOST_EMPTY = 256
_STATUS_NO_RIGHT = 401
_REFUSED = "The server refuses while requests run: wait for them, or stop them."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How answers are asked for."""

    max_tokens: int = 1024
    temperature: float | None = None
    """None: what the model's own configuration says."""
    system: str = ""
    """Sent before every conversation; empty for none."""

    def fields(self) -> dict[str, Any]:
        """Of a request."""
        given = {} if self.temperature is None else {"temperature": self.temperature}
        return {"max_completion_tokens": self.max_tokens, **given}


@dataclass(frozen=True, slots=True)
class Notice:
    """A short message for everybody who looks at this session."""

    number: int
    text: str
    is_error: bool = False


class Session:
    """Asks, stops and asks again. Answers go on while nobody looks: a reload loses nothing. For one event loop.

    Args:
        watch: told when something happened at the server.
    """

    def __init__(self, server: ServerClient, watch: Watch, options: AnswerOptions) -> None:
        self._server = server
        self._options = options
        self._watch = watch
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.conversations = Conversations()
        self.is_dark: bool | None = None
        """None: as the system has it."""
        self.notice = Notice(0, "")
        """The latest one."""
        self.on_said: Callable[[Session], None] = lambda _: None
        """Called when something is asked: it is worth keeping from now on."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever said."""
        return not any(conversation.exchanges for conversation in self.conversations)

    def send(self, conversation: Conversation, text: str) -> bool:
        """Ask ``text``; False if it is blank or an answer is still on its way: then nothing changes."""
        if not text.strip() or conversation.open_exchange is not None:
            return False
        self.on_said(self)
        # Blank lines around it go, and not what the first line begins with: code is indented.
        self._start(conversation, conversation.ask(re.sub(r"\A\s*\n", "", text.rstrip())))
        return True

    def retry(self, conversation: Conversation, exchange: Exchange) -> None:
        """Ask again for an answer that failed or was stopped. Only of the last exchange."""
        # The tab may show another conversation by now, and an empty one.
        last = conversation.exchanges[-1] if conversation.exchanges else None
        if conversation.open_exchange is None and exchange is last:
            conversation.ask_again(exchange)
            self._start(conversation, exchange)

    def stop(self, conversation: Conversation) -> None:
        """End an answer, here and at the server. What came until now stays."""
        if task := self._answering.get(conversation.number):
            task.cancel()

    def delete(self, conversation: Conversation) -> None:
        """Forget a conversation; its answer is stopped."""
        self.stop(conversation)
        self.conversations.delete(conversation)

    async def clear_gpu_cache(self) -> bool:
        """Clear it, and say in a notice what came of it. Whether it was cleared."""
        try:
            await self._server.clear_gpu_cache()
        except ChatError as error:
            self._tell(f"The GPU cache was not cleared. {error}. {self._hint(error)}".rstrip(), is_error=True)
            return False
        has_tier = self._watch.look.tier is not None
        self._tell("GPU cache cleared." + " The next answer shows what the tier brings back." * has_tier)
        self._watch.hurry()
        return True

    def _hint(self, error: ChatError) -> str:
        status = error.status if isinstance(error, RefusalError) else None
        if status == _STATUS_NO_RIGHT:
            call = f"curl -X POST {self._server.url}/flush_cache -H 'Authorization: Bearer ADMIN_KEY'"
            return f"If the server has an admin key, it takes only that for this: {call}"
        return _REFUSED if status == _STATUS_RUNNING else ""

    async def close(self) -> None:
        """Stop all answers."""
        tasks = list(self._answering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, text: str, *, is_error: bool = False) -> None:
        self.notice = Notice(self.notice.number + 1, text, is_error)

    def _start(self, conversation: Conversation, exchange: Exchange) -> None:
        task = asyncio.create_task(self._answer(conversation, exchange))
        self._answering[conversation.number] = task
        task.add_done_callback(lambda _: self._ended(conversation, exchange, task))

    async def _answer(self, conversation: Conversation, exchange: Exchange) -> None:
        messages = conversation.messages(exchange, self._options.system)
        task = asyncio.current_task()

        def follow(reader: StreamReader) -> None:
            if self._answering.get(conversation.number) is task:  # not stopped in the meantime
                exchange.follow(reader)

        try:
            await self._server.answer(messages, follow, **self._options.fields())
        except ChatError as error:
            exchange.end(Phase.FAILED, str(error))
        else:
            exchange.end(Phase.DONE)

    def _ended(self, conversation: Conversation, exchange: Exchange, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before its first step
            exchange.end(Phase.STOPPED)
        elif (error := task.exception()) is not None:
            exchange.end(Phase.FAILED, f"The page failed: {error!r}")
        if self._answering.get(conversation.number) is task:
            del self._answering[conversation.number]
        conversation.is_unread = True
        self._watch.hurry()


class Sessions:
    """Those of all browsers. Of the empty ones, which every page that is asked for without a cookie makes, the latest,
    and those that somebody looks at.

    Args:
        make: a new one.
    """

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make = make
        self._by_browser: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._kept: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter([*self._by_browser.values()])

    def of(self, browser: str) -> Session:
        """That of a browser, which asks for the page now."""
        session = self._by_browser.get(browser)
        if session is None:
            session = self._by_browser[browser] = self._make()
            session.on_said = partial(self._keep, browser)
        self._keep(browser, session)
        empty = [name for name, item in self._kept.items() if item.is_empty]
        for name in empty[:-_MOST_EMPTY]:
            del self._kept[name]
        return session

    def _keep(self, browser: str, session: Session) -> None:
        self._kept.pop(browser, None)
        self._kept[browser] = session  # behind all that were asked for before
