"""Where one writes: the field, Send and Stop, and what keeps the server from answering."""

from __future__ import annotations

from nicegui import events, ui

from sglang_hcache.cli.chat.conversation import Conversation, Selection
from sglang_hcache.cli.chat.figures import trouble_text
from sglang_hcache.cli.chat.page.parts import IS_ENTER, labelled
from sglang_hcache.cli.chat.session import Session
from sglang_hcache.cli.chat.watch import Watch

_ON_ENTER = f"""(event) => {{
    if (event.shiftKey || !({IS_ENTER})) return;
    event.preventDefault();
    emit(event.target.value);
}}"""
# What stands in the field now: what the server knows of it may be older.
_ON_CLICK = """() => emit(document.querySelector(".composer textarea").value)"""
_HINT = "Enter sends, Shift+Enter starts a new line."


class Composer:
    """The draft is the conversation's: it stays when another one is shown, and over a reload.

    Args:
        selection: the tab's.
        note: shown below the field; empty for none.
    """

    def __init__(self, session: Session, selection: Selection, watch: Watch, note: str) -> None:
        self._session = session
        self._selection = selection
        self._watch = watch
        self._shown: Conversation | None = None
        with ui.element("div").classes("trouble").props("role=alert") as self._trouble:
            ui.icon("cloud_off").props("aria-hidden=true")
            self._problem = ui.label()
        with ui.element("div").classes("write"):
            self._field = ui.textarea(placeholder="Write a message", on_change=self._typed)
            self._field.props("autogrow outlined dense autofocus input-style=max-height:35vh").classes(
                "field"
            )
            labelled(self._field, "Message")
            self._field.on("keydown", self._on_text, js_handler=_ON_ENTER)
            self._send = ui.button(icon="send").props("round unelevated").classes("send")
            self._send.on("click", self._on_text, js_handler=_ON_CLICK)
            labelled(self._send, "Send")
            self._stop = ui.button(icon="stop", on_click=self._on_stop).props(
                "round unelevated color=negative"
            )
            labelled(self._stop, "Stop this answer")
        ui.label(f"{_HINT} {note}".strip()).classes("hint")

    def refresh(self) -> None:
        """Show the selected conversation's draft, what can be done, and what is wrong."""
        conversation = self._selection.current
        if conversation is not self._shown:
            self._shown = conversation
            self._field.value = conversation.draft
        is_answering = conversation.open_exchange is not None
        self._send.set_visibility(not is_answering)
        self._stop.set_visibility(is_answering)
        self._send.set_enabled(bool((self._field.value or "").strip()))
        problem = trouble_text(self._watch.look)
        self._problem.text = problem
        self._trouble.set_visibility(bool(problem))

    def _typed(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        if self._shown is not None:
            self._shown.draft = event.value or ""

    def _on_text(self, event: events.GenericEventArguments) -> None:
        if self._session.send(self._selection.current, str(event.args)):
            self._field.value = ""
            ui.run_javascript("hcacheToEnd(); hcacheFocus('.composer textarea')")

    def _on_stop(self) -> None:
        self._session.stop(self._selection.current)
        ui.run_javascript("hcacheFocus('.composer textarea')")
