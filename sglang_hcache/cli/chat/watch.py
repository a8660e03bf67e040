"""Looks at the server again and again, as long as somebody looks at the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.server.client import FOREIGN_ERRORS, FOREIGN_STATE, ServerClient, SilentError, tier_of
from sglang_hcache.core.layout import Method

_EVERY_S = 2.0
_EVERY_AWAY_S = 1.0  # while the server is away: people wait
_VIEWER_S = 5.0  # a page that was not drawn for so long is closed


class Reach(StrEnum):
    """Whether the server answers."""

    UNKNOWN = "unknown"
    UP = "up"
    BUSY = "busy"
    """It takes requests and was silent so far."""
    AWAY = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of the server. Fields other than ``reach`` and ``problem`` are of the last time it answered."""

    reach: Reach = Reach.UNKNOWN
    problem: str = ""
    """Why there is no newer state."""
    model: str = ""
    tier: Mapping[str, Any] | None = None
    """The tier's state; None without the tier."""
    layers: tuple[Method, ...] = ()
    """What each layer stores; none without the tier."""


def look_of(info: Mapping[str, Any]) -> Look:
    """What ``/server_info`` says."""
    tier = tier_of(info)
    name = str(info.get("served_model_name") or info.get("model_path") or "")
    return Look(
        reach=Reach.UP,
        model=name.rstrip("/").rpartition("/")[2],
        tier=tier,
        layers=() if tier is None else tuple(map(Method, tier["layers"])),
    )


class Watch:
    """Keeps :attr:`look` fresh. ``run`` is one task; the rest may be called at any time on the same loop."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._seen_at = 0.0
        self._wake = asyncio.Event()
        self.look = Look()

    def seen(self) -> None:
        """Somebody looks at the page now."""
        was_closed = not self._has_viewers()
        self._seen_at = time.monotonic()
        if was_closed:
            self._wake.set()

    def hurry(self) -> None:
        """Something happened: look at once."""
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if self._has_viewers():
                await self._look_once()
            pause = _EVERY_AWAY_S if self.look.reach is Reach.AWAY else _EVERY_S
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                continue
            self._wake.clear()

    def _has_viewers(self) -> bool:
        return time.monotonic() - self._seen_at < _VIEWER_S

    async def _look_once(self) -> None:
        try:
            self.look = look_of(await self._server.info())
        except SilentError as error:
            self.look = replace(self.look, reach=Reach.BUSY, problem=str(error))
        except FOREIGN_ERRORS:
            self.look = replace(self.look, reach=Reach.AWAY, problem=FOREIGN_STATE)
        except ChatError as error:  # nobody is there, or it answers, but not as a server that is ready
            self.look = replace(self.look, reach=Reach.AWAY, problem=str(error))
