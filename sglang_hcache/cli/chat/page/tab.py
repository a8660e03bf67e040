"""The page: header, conversations, the selected one, the tier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nicegui import ui
from nicegui.elements.drawer import Drawer

from sglang_hcache.cli.chat.conversation import Selection
from sglang_hcache.cli.chat.figures import tier_html
from sglang_hcache.cli.chat.page.composer import Composer
from sglang_hcache.cli.chat.page.parts import icon_button, labelled
from sglang_hcache.cli.chat.page.sidebar import Sidebar
from sglang_hcache.cli.chat.page.thread import Thread
from sglang_hcache.cli.chat.session import Session
from sglang_hcache.cli.chat.watch import Look, Reach, Watch
from sglang_hcache.cli.logbooks import Starter

_REFRESH_S = 0.15
_NARROW = 1023
"""Pixels: on screens up to this width both panels are drawers that the header's buttons open."""
_CLEAR = "Clear the GPU cache"
_CLEAR_HINT = (
    "Drops the KV cache of all conversations on this server, those of other people too. What the tier holds stays; "
    "whatever exists only in host memory is also written to disk. Refused while requests run."
)
_THEMES = {
    None: ("brightness_auto", "Colours follow the system"),
    False: ("light_mode", "Light colours"),
    True: ("dark_mode", "Dark colours"),
}
"""Whether it is dark -> icon and what it means; None: as the system has it."""
_REACH = {
    Reach.UNKNOWN: "looking for the server",
    Reach.UP: "ready",
    Reach.BUSY: "busy",
    Reach.AWAY: "not reachable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTexts:
    """What a page says besides its own words."""

    starters: Sequence[Starter]
    note: str
    """About the model, say; shown in new conversations and below the field."""


class ChatPage:
    """One page in one browser tab. Builds itself in the current NiceGUI page.

    Args:
        clear_gpu_cache: clears it, and tells the session what came of it.
    """

    def __init__(
        self,
        session: Session,
        watch: Watch,
        texts: PageTexts,
        clear_gpu_cache: Callable[[Session], Awaitable[None]],
    ) -> None:
        self._session = session
        self._selection = Selection(session.conversations)
        self._watch = watch
        self._clear_gpu_cache = clear_gpu_cache
        self._noticed = session.notice.number
        self._shown: Look | None = None
        self._dark = ui.dark_mode(session.is_dark)
        with ui.header().classes("top"):
            self._header()
        with self._drawer(ui.left_drawer, 270) as self._left:
            with ui.element("nav") as navigation:
                self._sidebar = Sidebar(session, self._selection, self._refresh)
            labelled(navigation, "Conversations")
        with self._drawer(ui.right_drawer, 320) as self._right:
            with ui.element("section") as region:
                self._panel()
            labelled(region, "Tier")
        self._thread = Thread(session, self._selection, texts.starters, texts.note)
        ui.skip_link("Skip to the conversation", target=self._thread.root)
        with ui.footer().classes("composer"):
            self._composer = Composer(session, self._selection, watch, texts.note)
        # Quasar hands no attribute on to what it makes of a drawer.
        ui.run_javascript('hcacheNameDrawers("Conversations", "Tier")')
        self._refresh()
        ui.timer(_REFRESH_S, self._refresh)

    def _drawer(self, side: Callable[..., Drawer], width: int) -> Drawer:
        # The browser knows whether it is open. Without a value it would be asked, and an error logged where it takes
        # longer than a second to answer.
        drawer = side(value=False, bordered=True, bottom_corner=True)
        return drawer.props(f"show-if-above width={width} breakpoint={_NARROW}").classes("side")

    def _header(self) -> None:
        icon_button("menu", "Conversations", lambda: self._left.run_method("toggle"))
        ui.label("hcache chat").classes("name").props("role=heading aria-level=1")
        with ui.element("div").classes("reach").props("role=status") as self._reach:
            ui.element("i").classes("light").props("aria-hidden=true")
            self._model = ui.label().classes("model")
            self._state = ui.label()
        ui.space()
        icon, label = _THEMES[self._session.is_dark]
        self._theme = icon_button(icon, label, self._next_theme)
        icon_button("data_usage", "Tier", lambda: self._right.run_method("toggle"))

    def _panel(self) -> None:
        ui.label("The tier").classes("heading").props("role=heading aria-level=2")
        with ui.element("div").classes("clear"):
            button = ui.button(_CLEAR, icon="cleaning_services", on_click=self._clear).props(
                "outline no-caps"
            )
            button.props["aria-describedby"] = ui.label(_CLEAR_HINT).classes("hint").html_id
        self._tier = ui.html(sanitize=False).classes("panel")

    def _refresh(self) -> None:
        self._watch.seen()
        self._selection.current.is_unread = False
        self._sidebar.refresh()
        self._thread.refresh()
        self._composer.refresh()
        look = self._watch.look
        if look is not self._shown:
            self._shown = look
            self._tier.content = tier_html(look)
            self._model.text = look.model
            self._state.text = _REACH[look.reach]
            self._reach.classes(replace=f"reach {look.reach}")
        notice = self._session.notice
        if notice.number != self._noticed:
            self._noticed = notice.number
            ui.notify(
                notice.text,
                type="negative" if notice.is_error else "positive",
                position="top",
                timeout=20000 if notice.is_error else 5000,
            )

    async def _clear(self) -> None:
        await self._clear_gpu_cache(self._session)

    def _next_theme(self) -> None:
        order = list(_THEMES)
        value = order[(order.index(self._session.is_dark) + 1) % len(order)]
        self._session.is_dark = value
        self._dark.value = value
        icon, label = _THEMES[value]
        self._theme.icon = icon
        labelled(self._theme, label)
        ui.notify(label, position="top", timeout=1500)
