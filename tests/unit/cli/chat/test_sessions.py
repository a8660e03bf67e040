"""The sessions of all browsers."""

from __future__ import annotations

from sglang_hcache.cli.chat import session
from sglang_hcache.cli.chat.client import AnswerOptions, AsyncChatClient
from sglang_hcache.cli.chat.session import Session, Sessions
from sglang_hcache.cli.chat.watch import Watch


def test_of_empty_sessions_the_latest_stay_and_of_others_all() -> None:
    """Who asks for the page without a cookie, a monitor say, gets a new one each time."""
    server = AsyncChatClient("http://127.0.0.1:9", AnswerOptions())
    sessions = Sessions(lambda: Session(server, Watch(server)))
    talking = sessions.of("talking")
    talking.conversations.selected.ask("Good morning.")
    reading = sessions.of("reading")
    for number in range(session._MOST_EMPTY - 1):
        sessions.of(f"monitor {number}")
    assert sessions.of("reading") is reading
    assert len([*sessions]) == session._MOST_EMPTY + 1
    for number in range(10 * session._MOST_EMPTY):
        sessions.of(f"other monitor {number}")
    assert len([*sessions]) == session._MOST_EMPTY + 1
    assert sessions.of("talking") is talking
    assert sessions.of("reading") is not reading
