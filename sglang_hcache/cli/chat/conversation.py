"""Conversations and how far their answers are. No I/O: what the page shows can be tested without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_hcache.cli.server.answers import StreamReader, TokenSources
from sglang_hcache.cli.server.client import Message

UNTITLED = "New conversation"
_TITLE_LENGTH = 42  # characters; more do not fit into the list


class Phase(StrEnum):
    """How far an answer is."""

    WAITING = "waiting"
    """Sent; no token yet."""
    STREAMING = "streaming"
    DONE = "done"
    STOPPED = "stopped"
    """By the user; what came until then stays."""
    FAILED = "failed"
    """By the server or on the way; can be tried again."""

    @property
    def is_open(self) -> bool:
        return self in (Phase.WAITING, Phase.STREAMING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What an answer took, so far."""

    ttft_s: float | None
    """From sending the question to the first token, seconds."""
    latest_s: float | None
    """From sending the question to the latest token, seconds."""
    num_tokens: int | None
    sources: TokenSources | None
    """None while the answer is on its way, and for one that was cut short: servers say it at the end."""
    is_cut: bool
    """Whether the answer reached the longest length that was asked for."""

    @classmethod
    def of(cls, reader: StreamReader) -> Measures:
        """What ``reader`` knows by now."""
        return cls(
            ttft_s=reader.ttft_s,
            latest_s=reader.latest_s,
            num_tokens=reader.num_tokens,
            sources=reader.sources,
            is_cut=reader.finish_reason == "length",
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one over the time since it came; None with fewer than two."""
        if self.ttft_s is None or self.latest_s is None or not self.num_tokens:
            return None
        seconds = self.latest_s - self.ttft_s
        return (self.num_tokens - 1) / seconds if self.num_tokens > 1 and seconds > 0 else None


@dataclass(slots=True)
class Exchange:
    """A question and its answer."""

    question: str
    ask_number: int = 0
    """How many times something had been asked in its conversation when this was, the latest time."""
    after_clearing: bool = False
    """Whether the GPU cache was cleared since the last answer."""
    answer: str = ""
    thoughts: str = ""
    phase: Phase = Phase.WAITING
    error: str = ""
    measures: Measures | None = None
    version: int = 0
    """Grows with every change, for whoever shows it."""
    is_plain: bool = False
    """Whether its Markdown took too long to lay out: it is shown as text."""

    def follow(self, reader: StreamReader) -> None:
        """A piece of the answer came."""
        self.answer, self.thoughts = reader.text, reader.thoughts
        self.measures = Measures.of(reader)
        if reader.ttft_s is not None:
            self.phase = Phase.STREAMING
        self.version += 1

    def end(self, phase: Phase, error: str = "") -> None:
        """No more will come."""
        self.phase, self.error = phase, error
        self.version += 1

    def mark_cleared(self) -> None:
        """The GPU cache was cleared just before the question."""
        self.after_clearing = True
        self.version += 1

    def begin_again(self) -> None:
        """Forget the answer: it is asked for again."""
        self.answer = self.thoughts = self.error = ""
        self.measures = None
        self.is_plain = False
        self.phase = Phase.WAITING
        self.version += 1


@dataclass(slots=True)
class Conversation:
    """What was said, in order."""

    number: int
    title: str = UNTITLED
    exchanges: list[Exchange] = field(default_factory=list)
    draft: str = ""
    """Typed, not sent."""
    num_asked: int = 0
    """How many times something was asked: what is asked again counts again."""
    is_cleared: bool = False
    """Whether the GPU cache was cleared since the last question."""
    is_unread: bool = False
    """Whether an answer ended that no tab has shown yet."""

    @property
    def open_exchange(self) -> Exchange | None:
        """The one whose answer is on its way."""
        return next((exchange for exchange in self.exchanges if exchange.phase.is_open), None)

    def ask(self, question: str) -> Exchange:
        """Add a question. The first one is the title, if there is none yet."""
        assert self.open_exchange is None, "one answer at a time"
        if not self.exchanges and self.title == UNTITLED:
            self.title = title_of(question)
        exchange = Exchange(question)
        self.exchanges.append(exchange)
        self.draft = ""
        self._count(exchange)
        return exchange

    def ask_again(self, exchange: Exchange) -> None:
        """Forget the answer to a question, and ask for it again."""
        assert self.open_exchange is None, "one answer at a time"
        exchange.begin_again()
        self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        """It is asked now: the first one since the GPU cache was cleared says so."""
        self.num_asked += 1
        exchange.ask_number = self.num_asked
        if self.is_cleared:
            exchange.mark_cleared()
        self.is_cleared = False

    def messages(self, exchange: Exchange, system: str) -> list[Message]:
        """What to send for an answer to ``exchange``: all before it that was answered, and its question.

        Args:
            system: the system prompt; empty for none.
        """
        found = [Message(role="system", content=system)] if system else []
        for earlier in itertools.takewhile(lambda one: one is not exchange, self.exchanges):
            # Models expect turns to alternate: a question without an answer is left out.
            if earlier.answer:
                found.append(Message(role="user", content=earlier.question))
                found.append(Message(role="assistant", content=earlier.answer))
        return [*found, Message(role="user", content=exchange.question)]


class Conversations:
    """One browser's conversations, the latest first; never empty."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._items: list[Conversation] = []
        self.selected = self.new()
        """The one chosen last, in whichever tab: a new tab shows it."""

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def new(self) -> Conversation:
        """An empty one, selected. One that is still empty is used again."""
        empty = next((item for item in self._items if not item.exchanges and item.title == UNTITLED), None)
        if empty is None:
            empty = Conversation(next(self._numbers))
            self._items.insert(0, empty)
        self.selected = empty
        return empty

    def select(self, conversation: Conversation) -> None:
        """Choose another one, unless it was deleted meanwhile."""
        if conversation in self._items:
            self.selected = conversation

    def rename(self, conversation: Conversation, title: str) -> None:
        """Change a title; nothing but blanks changes nothing."""
        conversation.title = title_of(title) if title.strip() else conversation.title

    def delete(self, conversation: Conversation) -> None:
        """Forget one, unless another tab did. Its neighbour is shown instead, or a new one."""
        if conversation not in self._items:
            return
        place = self._items.index(conversation)
        self._items.remove(conversation)
        if conversation is self.selected:
            if self._items:
                self.select(self._items[min(place, len(self._items) - 1)])
            else:
                self.new()

    def asked(self) -> dict[int, int]:
        """Number of each conversation -> how many times something was asked in it."""
        return {conversation.number: conversation.num_asked for conversation in self._items}

    def cache_cleared(self, asked: Mapping[int, int]) -> None:
        """The GPU cache was cleared: it is one for all conversations.

        Args:
            asked: :meth:`asked` when the server was told to. What was asked since then came after it.
        """
        for conversation in self._items:
            before = asked.get(conversation.number, 0)
            late = [item for item in conversation.exchanges if item.ask_number > before]
            if before and late:
                late[0].mark_cleared()
            elif before:
                conversation.is_cleared = True


class Selection:
    """Which conversation one tab shows: what another tab chooses does not change it."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._chosen = conversations.selected

    @property
    def current(self) -> Conversation:
        """The one chosen in this tab; once it is deleted, the one chosen last in any."""
        if self._chosen not in self._conversations:
            self._chosen = self._conversations.selected
        return self._chosen

    def choose(self, conversation: Conversation) -> None:
        """Show another one."""
        self._conversations.select(conversation)
        self._chosen = conversation


def title_of(text: str) -> str:
    """The beginning of ``text`` on one line, cut between words if it is too long."""
    line = " ".join(text.split())
    if len(line) <= _TITLE_LENGTH:
        return line or UNTITLED
    cut = line[: _TITLE_LENGTH - 1]
    kept = cut.rsplit(" ", 1)[0] if " " in cut[_TITLE_LENGTH // 2 :] else cut
    return kept.rstrip(",.;:") + "…"
