"""Logbooks that share nothing with one another, and questions about them: what the demo says, the chat page offers."""

from __future__ import annotations

import random
from dataclasses import dataclass

_DAYS = 14
_SHIPS = ("Heron", "Petrel", "Gannet", "Curlew", "Dunlin", "Plover", "Turnstone", "Kittiwake")
_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_SEAS = ("smooth", "slight", "moderate", "rough", "very rough")
_PEOPLE = ("The captain", "The mate", "The cook", "The engineer", "A passenger", "The surgeon")
_DEEDS = (
    "mended the mizzen sail",
    "counted the water barrels",
    "saw a whale to starboard",
    "took the noon sight twice",
    "wrote letters until dark",
    "found the pump half blocked",
    "traded a knife for a drum",
    "sighted land and lost it again",
)
_QUESTIONS = (
    "Who did most of the work, and on which days?",
    "On which day was the sea at its worst, and what did the crew do then?",
    "Compare the first week with the second: wind, sea and what was done.",
    "Which day would you leave out of a short version of this log, and why?",
    "What should the captain have done differently after the first sight of land?",
    "Sum the distances of the days with a west wind.",
    "Write the entry of the following day in the same style.",
)
_STARTERS = 3

Script = list[str]
"""What the user says in one conversation, message by message."""


def write_scripts(conversations: int, turns: int) -> list[Script]:
    """One script of ``turns`` messages for each conversation; the same ones every time."""
    return [_script(number, turns, random.Random(f"0/{number}")) for number in range(conversations)]


@dataclass(frozen=True, slots=True)
class Starter:
    """Something to begin a conversation with: long enough that the tier keeps something of it."""

    name: str
    text: str


def starters() -> tuple[Starter, ...]:
    """The first messages of some conversations; the same ones every time."""
    texts = [text for (text,) in write_scripts(_STARTERS, 1)]
    return tuple(
        Starter(f"{text.split(',')[0]} ({len(text.split()):,} words)", text)  # Log of the Heron
        for text in texts
    )


def _script(number: int, turns: int, dice: random.Random) -> Script:
    logbook = _logbook(number, dice)
    texts = [f"{logbook}\n{_QUESTIONS[0]}"]
    for turn in range(1, turns):
        day = _DAYS + turn
        question = _QUESTIONS[turn % len(_QUESTIONS)]
        texts.append(f"Thank you. Here is one day more. {_entry(day, dice)} {question}")
    return texts


def _logbook(number: int, dice: random.Random) -> str:
    ship = _SHIPS[number % len(_SHIPS)]
    days = " ".join(_entry(day, dice) for day in range(1, _DAYS + 1))
    return f"Log of the {ship}, voyage {number + 1}. {days}"


def _entry(day: int, dice: random.Random) -> str:
    hours, minutes = dice.randrange(24), dice.randrange(60)
    return (
        f"Day {day}. Wind {dice.choice(_WINDS)} at {dice.randrange(3, 45)} knots, sea {dice.choice(_SEAS)}, "
        f"{dice.randrange(20, 240)} miles made good. {dice.choice(_PEOPLE)} {dice.choice(_DEEDS)} "
        f"at {hours:02}:{minutes:02}."
    )
