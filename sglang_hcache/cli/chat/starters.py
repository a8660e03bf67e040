"""Texts that a new conversation offers: long enough that the tier keeps something of them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hcache.cli.logbooks import write_scripts

_LOGBOOKS = 3


@dataclass(frozen=True, slots=True)
class Starter:
    """Something to begin a conversation with."""

    name: str
    text: str


def starters() -> tuple[Starter, ...]:
    """The first messages of some of the demo's conversations; the same ones every time."""
    texts = [text for (text,) in write_scripts(_LOGBOOKS, 1)]
    return tuple(
        Starter(f"{text.split(',')[0]} ({len(text.split()):,} words)", text)  # Log of the Heron
        for text in texts
    )
