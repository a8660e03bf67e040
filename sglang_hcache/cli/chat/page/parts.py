"""What all parts of the page use."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui

# Not while an input method composes a character: its Enter means something else. Safari says 229, not isComposing.
IS_ENTER = 'event.key === "Enter" && !event.isComposing && event.keyCode !== 229'
"""Of a ``keydown`` event, in JavaScript."""


def labelled(element: ui.element, label: str) -> None:
    """Say what ``element`` is to who cannot see it."""
    element.props["aria-label"] = label


def icon_button(icon: str, label: str, on_click: Callable[[], object]) -> ui.button:
    """A round button without text: its label is a tooltip, and said to who cannot see it."""
    button = ui.button(icon=icon, on_click=on_click).props("flat round dense").classes("icon")
    labelled(button, label)
    with button:
        ui.tooltip(label)
    return button


async def submitted(dialog: ui.dialog) -> object:
    """What ``dialog`` was submitted with, None without an answer; it is gone then. The page may be closed meanwhile."""
    result: object = await dialog
    if dialog.is_deleted or dialog.client.is_deleted:
        return None
    dialog.delete()
    return result
