"""The list of conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from sglang_hcache.cli.chat.conversation import Conversation, Selection
from sglang_hcache.cli.chat.page.parts import IS_ENTER, labelled, submitted
from sglang_hcache.cli.chat.session import Session


@dataclass(slots=True)
class _Row:
    item: ui.element
    button: ui.element
    title: ui.label
    state: ui.label


class Sidebar:
    """Rows are changed in place: one that is built anew would lose the keyboard's focus.

    Args:
        selection: the tab's, which this changes.
        on_change: draws the page again, at once: what is typed next belongs to the conversation that was chosen.
    """

    def __init__(self, session: Session, selection: Selection, on_change: Callable[[], None]) -> None:
        self._session = session
        self._selection = selection
        self._on_change = on_change
        self._rows: dict[int, _Row] = {}
        with ui.element("div").classes("sidebar-top"):
            ui.button("New conversation", icon="add", on_click=self._new).props("unelevated no-caps").classes(
                "new"
            )
        self._list = ui.element("ul").classes("conversations")
        labelled(self._list, "Conversations")

    def refresh(self) -> None:
        """Show the session as it is now."""
        conversations = list(self._session.conversations)
        numbers = {conversation.number for conversation in conversations}
        for number in self._rows.keys() - numbers:
            self._rows.pop(number).item.delete()
        for place, conversation in enumerate(conversations):
            row = self._rows.get(conversation.number)
            if row is None:
                row = self._rows[conversation.number] = self._build(conversation)
                row.item.move(target_index=place)
            self._update(row, conversation)

    def _update(self, row: _Row, conversation: Conversation) -> None:
        is_selected = conversation is self._selection.current
        is_answering = conversation.open_exchange is not None
        if row.title.text != conversation.title:
            row.title.text = conversation.title
            labelled(row.button, conversation.title)
        state = "answering" if is_answering else "new answer" if conversation.is_unread else ""
        if row.state.text != state:
            row.state.text = state
            row.state.classes(replace=f"state {state.replace(' ', '-')}")
        current = "true" if is_selected else "false"
        if row.button.props.get("aria-current") != current:
            row.button.props["aria-current"] = current

    def _build(self, conversation: Conversation) -> _Row:
        with self._list, ui.element("li") as item:
            with ui.element("button").classes("open").props("type=button") as button:
                title = ui.label().classes("title")
                state = ui.label().classes("state")
            button.on("click", partial(self._select, conversation))
            with ui.button(icon="more_vert").props("flat round dense size=sm").classes("more") as more:
                labelled(more, "Rename or delete this conversation")
                with ui.menu().props("auto-close"):
                    ui.menu_item("Rename", lambda: self._rename(conversation), auto_close=False)
                    ui.menu_item("Delete", lambda: self._delete(conversation), auto_close=False)
        return _Row(item, button, title, state)

    def _select(self, conversation: Conversation) -> None:
        self._selection.choose(conversation)
        self._on_change()
        ui.run_javascript("hcacheCloseDrawers()")

    def _new(self) -> None:
        self._selection.choose(self._session.conversations.new())
        self._on_change()
        ui.run_javascript("hcacheCloseDrawers(); hcacheFocus('.composer textarea')")

    async def _rename(self, conversation: Conversation) -> None:
        with ui.dialog() as dialog, ui.card().classes("ask"):
            field = (
                ui.input("Title", value=conversation.title).props("autofocus outlined dense").classes("field")
            )
            field.on(
                "keydown", lambda: dialog.submit(field.value), js_handler=f"event => {IS_ENTER} && emit()"
            )
            with ui.element("div").classes("buttons"):
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Rename", on_click=lambda: dialog.submit(field.value)).props("unelevated no-caps")
        title = await submitted(dialog)
        if title:
            self._session.conversations.rename(conversation, str(title))

    async def _delete(self, conversation: Conversation) -> None:
        with ui.dialog() as dialog, ui.card().classes("ask"):
            ui.label(f"Delete “{conversation.title}”?").classes("question-text")
            ui.label("It is kept nowhere else.").classes("hint")
            with ui.element("div").classes("buttons"):
                ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
                ui.button("Delete", color="negative", on_click=lambda: dialog.submit(True)).props(
                    "unelevated no-caps"
                )
        if await submitted(dialog):
            self._session.delete(conversation)
