"""One conversation: questions, answers, and what each answer took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nicegui import ui

from sglang_hcache.cli.chat.conversation import Conversation, Exchange, Phase, Selection
from sglang_hcache.cli.chat.figures import exchange_html
from sglang_hcache.cli.chat.page.answer_html import GrowingAnswer
from sglang_hcache.cli.chat.page.parts import labelled
from sglang_hcache.cli.chat.session import Session
from sglang_hcache.cli.logbooks import Starter

_LONG_QUESTION = 600  # characters; longer ones are folded
_CLEARED = "GPU cache cleared"
_TEACHING = (
    "Each answer shows how long its first token took, and where its prompt's tokens came from: the KV cache of the "
    "GPU, the tier in host memory or on disk, or computed again. To see a restore, send a long message and then "
    "another one, press Clear the GPU cache (above the tier's numbers), and send a third."
)


class Thread:
    """Shows the selected conversation. Changed in place while an answer comes.

    Args:
        selection: the tab's.
        starters: texts that a new conversation offers.
        note: shown in a new conversation; empty for none.
    """

    def __init__(
        self, session: Session, selection: Selection, starters: Sequence[Starter], note: str
    ) -> None:
        self._session = session
        self._selection = selection
        self._starters = starters
        self._note = note
        self._shown: Conversation | None = None
        self._views: list[_ExchangeView] = []
        self.root = ui.element("div").classes("thread").props("role=log aria-live=off tabindex=-1")
        labelled(self.root, "Conversation")
        self._said = ui.label().classes("sr-only").props("role=status aria-live=polite")

    def refresh(self) -> None:
        """Show the conversation as it is now."""
        conversation = self._selection.current
        if conversation is not self._shown or len(conversation.exchanges) < len(self._views):
            self._clear(conversation)
        if conversation.exchanges and not self._views:
            self._body.clear()
        with self._body:
            for exchange in conversation.exchanges[len(self._views) :]:
                self._views.append(_ExchangeView(exchange, self._retry))
        for view in self._views:
            if view.refresh(is_last=view is self._views[-1]):
                self._say(view.exchange)
        self._cleared.set_visibility(conversation.is_cleared and bool(conversation.exchanges))

    def _clear(self, conversation: Conversation) -> None:
        self._shown = conversation
        self._views = []
        self.root.clear()
        with self.root:
            self._body = ui.element("div").classes("body")
            self._cleared = ui.label(_CLEARED).classes("divider").props("role=separator")
        if not conversation.exchanges:
            with self._body:
                self._welcome()
        ui.run_javascript("hcacheToEnd()")

    def _welcome(self) -> None:
        with ui.element("div").classes("welcome"):
            ui.label("Ask something").classes("heading").props("role=heading aria-level=2")
            ui.label(_TEACHING)
            if self._note:
                ui.label(self._note).classes("note")
            if self._starters:
                ui.label("Or start with a text that is long enough to be worth keeping:")
                with ui.element("div").classes("starters"):
                    for starter in self._starters:
                        button = ui.button(starter.name, icon="article").props("outline no-caps align=left")
                        button.on_click(partial(self._ask, starter.text))

    def _ask(self, text: str) -> None:
        self._session.send(self._selection.current, text)
        ui.run_javascript("hcacheToEnd()")

    def _retry(self, exchange: Exchange) -> None:
        self._session.retry(self._selection.current, exchange)

    def _say(self, exchange: Exchange) -> None:
        """For who listens: how an answer ended, not each of its words."""
        said = {Phase.DONE: "Answer complete.", Phase.STOPPED: "Stopped.", Phase.FAILED: "The answer failed."}
        self._said.text = said.get(exchange.phase, "")


class _ExchangeView:
    """A question with its answer."""

    def __init__(self, exchange: Exchange, retry: Callable[[Exchange], None]) -> None:
        self.exchange = exchange
        self._answer = GrowingAnswer(exchange)
        self._version = -1
        self._phase: Phase | None = None
        self._was_last: bool | None = None
        self._cleared = ui.label(_CLEARED).classes("divider").props("role=separator")
        with ui.element("article").classes("exchange") as self._root:
            self._question(exchange.question)
            with ui.element("div").classes("answer"):
                self._thoughts = ui.label().classes("thoughts")
                # NiceGUI's class brings its looks of Markdown; sanitised in the browser once more.
                self._text = ui.html(sanitize=True).classes("text nicegui-markdown")
                self._waiting = ui.element("div").classes("typing").props("role=img")
                labelled(self._waiting, "Waiting for the first token")
                with self._waiting:
                    for _ in range(3):
                        ui.element("i")
                self._empty = ui.label("The answer is empty.").classes("hint")
                with ui.element("div").classes("failure").props("role=alert") as self._failure:
                    ui.icon("error_outline").props("aria-hidden=true")
                    self._error = ui.label()
                self._figures = ui.html(sanitize=False).classes("figures")
                self._again = ui.button("Try again", icon="refresh", on_click=lambda: retry(exchange)).props(
                    "flat dense no-caps"
                )

    def _question(self, question: str) -> None:
        with ui.element("div").classes("question"):
            text = ui.label(question).classes("text")
            if len(question) > _LONG_QUESTION:
                text.classes("folded")

                def unfold() -> None:
                    is_folded = "folded" in text.classes
                    text.classes(toggle="folded")
                    button.text = "Show less" if is_folded else "Show all"
                    button.props["aria-expanded"] = "true" if is_folded else "false"

                button = ui.button("Show all", on_click=unfold).props(
                    "flat dense no-caps size=sm aria-expanded=false"
                )

    def refresh(self, *, is_last: bool) -> bool:
        """Show what changed; whether the answer's phase did."""
        exchange = self.exchange
        if exchange.version == self._version and is_last == self._was_last and not self._answer.is_behind:
            return False
        was = self._phase
        self._version, self._phase, self._was_last = exchange.version, exchange.phase, is_last
        self._cleared.set_visibility(exchange.after_clearing)
        self._thoughts.text = exchange.thoughts
        self._thoughts.set_visibility(bool(exchange.thoughts))
        self._text.content = self._answer.html()
        self._text.set_visibility(bool(exchange.answer))
        self._waiting.set_visibility(exchange.phase is Phase.WAITING)
        self._empty.set_visibility(exchange.phase is Phase.DONE and not exchange.answer)
        self._error.text = exchange.error
        self._failure.set_visibility(exchange.phase is Phase.FAILED)
        self._figures.content = exchange_html(exchange)
        self._again.set_visibility(is_last and exchange.phase in (Phase.FAILED, Phase.STOPPED))
        self._root.props["aria-busy"] = "true" if exchange.phase.is_open else "false"
        return was is not None and was is not exchange.phase
