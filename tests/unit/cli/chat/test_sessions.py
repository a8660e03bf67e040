"""The sessions of all browsers."""

from __future__ import annotations

import asyncio

from sglang_hcache.cli.chat import session
from sglang_hcache.cli.chat.conversation import Phase
from sglang_hcache.cli.chat.session import AnswerOptions, Session, Sessions
from sglang_hcache.cli.chat.watch import Watch
from sglang_hcache.cli.server.client import ServerClient


def test_of_empty_sessions_the_latest_stay_and_of_others_all() -> None:
    """Who asks for the page without a cookie, a monitor say, gets a new one each time."""
    server = ServerClient("http://127.0.0.1:9")
    sessions = Sessions(lambda: Session(server, Watch(server), AnswerOptions()))
    talking = sessions.of("talking")
    talking.conversations.selected.ask("Good morning.")
    reading = sessions.of("reading")
    tab = sessions.of("open tab")
    for number in range(session._MOST_EMPTY - 2):
        sessions.of(f"monitor {number}")
    assert sessions.of("reading") is reading
    assert len([*sessions]) == session._MOST_EMPTY + 1
    reading = None
    for number in range(10 * session._MOST_EMPTY):
        sessions.of(f"other monitor {number}")
    assert sessions.of("talking") is talking
    assert sessions.of("open tab") is tab
    assert tab in [*sessions]
    assert len([*sessions]) <= session._MOST_EMPTY + 2


def test_who_says_something_in_a_page_that_was_open_for_long_is_known_when_it_comes_back() -> None:
    async def talk() -> None:
        server = ServerClient("http://127.0.0.1:9")
        sessions = Sessions(lambda: Session(server, Watch(server), AnswerOptions()))
        tab = sessions.of("tab")
        for number in range(2 * session._MOST_EMPTY):
            sessions.of(f"monitor {number}")
        assert tab.send(tab.conversations.selected, "Good morning.")
        number_of_conversations = tab.conversations.selected.number
        await tab.close()
        assert tab.conversations.selected.is_unread, "until a tab shows it"
        del tab
        assert not sessions.of("tab").is_empty
        assert sessions.of("tab").conversations.selected.number == number_of_conversations

    asyncio.run(talk())


def test_code_keeps_what_its_first_line_begins_with() -> None:
    async def talk() -> None:
        server = ServerClient("http://127.0.0.1:9")
        session = Session(server, Watch(server), AnswerOptions())
        conversation = session.conversations.selected
        assert not session.send(conversation, " \n")
        assert session.send(conversation, "\n  \n    if x:\n        y()\n \n")
        await session.close()
        assert conversation.exchanges[0].question == "    if x:\n        y()"
        assert conversation.title == "if x: y()"

    asyncio.run(talk())


def test_trying_again_in_a_tab_that_shows_another_conversation_by_now_does_nothing() -> None:
    server = ServerClient("http://127.0.0.1:9")
    session = Session(server, Watch(server), AnswerOptions())
    failed = session.conversations.selected.ask("Good morning.")
    failed.end(Phase.FAILED, "no server")
    session.retry(session.conversations.new(), failed)
    assert failed.phase is Phase.FAILED
