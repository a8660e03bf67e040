"""Conversations of ``hcache chat``: what is sent, what stays after a failure, titles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_hcache.cli.chat.conversation import (
    UNTITLED,
    Conversation,
    Conversations,
    Exchange,
    Measures,
    Phase,
    Selection,
    title_of,
)
from sglang_hcache.cli.server.answers import StreamReader, TokenSources


def reader(*pieces: str, whole: bool = True, finish: str = "stop") -> StreamReader:
    """As after a stream of ``pieces``, a token each."""
    found = StreamReader()

    def take(chunk: dict[str, Any]) -> None:
        found.take(f"data: {json.dumps(chunk)}")

    for count, piece in enumerate(pieces, 1):
        usage = {"prompt_tokens": 100, "completion_tokens": count}
        take({"choices": [{"delta": {"content": piece}}], "usage": usage})
    if whole:
        take({"choices": [{"delta": {}, "finish_reason": finish}]})
        take({"choices": [], "sglext": {"cached_tokens_details": {"device": 10, "host": 64, "storage": 0}}})
        found.take("data: [DONE]")
    return found


def answered(conversation: Conversation, question: str, *pieces: str) -> Exchange:
    exchange = conversation.ask(question)
    exchange.follow(reader(*pieces))
    exchange.end(Phase.DONE)
    return exchange


def test_an_answer_grows_and_ends() -> None:
    conversation = Conversation(1)
    exchange = conversation.ask("Why?")
    assert exchange.phase is Phase.WAITING
    assert conversation.open_exchange is exchange
    versions = [exchange.version]
    exchange.follow(reader(whole=False))
    assert exchange.phase is Phase.WAITING
    exchange.follow(reader("Be", whole=False))
    versions.append(exchange.version)
    assert (exchange.phase, exchange.answer) == (Phase.STREAMING, "Be")
    assert exchange.measures is not None
    assert exchange.measures.sources is None  # nobody knows yet
    exchange.follow(reader("Be", "cause"))
    exchange.end(Phase.DONE)
    versions.append(exchange.version)
    assert exchange.answer == "Because"
    assert exchange.measures.sources == TokenSources(device=10, host=64, disk=0, recomputed=26)
    assert not exchange.measures.is_cut
    assert conversation.open_exchange is None
    assert versions == sorted(set(versions))


def test_what_is_sent() -> None:
    conversation = Conversation(1)
    answered(conversation, "one", "1")
    failed = conversation.ask("lost")
    failed.end(Phase.FAILED, "no server")
    stopped = conversation.ask("two")
    stopped.follow(reader("2", whole=False))
    stopped.end(Phase.STOPPED)
    last = conversation.ask("three")
    assert [message["content"] for message in conversation.messages(last, "")] == [
        "one",
        "1",
        "two",
        "2",
        "three",
    ]
    sent = conversation.messages(stopped, "Be brief.")
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[-1]["content"] == "two"


def test_beginning_again_forgets_the_answer_only() -> None:
    conversation = Conversation(1)
    exchange = conversation.ask("one")
    exchange.follow(reader("half", whole=False))
    exchange.end(Phase.FAILED, "broke")
    exchange.begin_again()
    assert (exchange.question, exchange.answer, exchange.error) == ("one", "", "")
    assert exchange.measures is None
    assert exchange.phase.is_open


def test_clearing_the_cache_marks_the_next_question() -> None:
    conversations = Conversations()
    conversation = conversations.selected
    conversations.cache_cleared(conversations.asked())
    assert not conversation.is_cleared  # nothing of it was there
    answered(conversation, "one", "1")
    conversations.cache_cleared(conversations.asked())
    assert conversation.is_cleared
    assert conversation.ask("two").after_clearing
    assert not conversation.is_cleared


def test_a_question_asked_while_the_cache_is_cleared_comes_after_it() -> None:
    conversations = Conversations()
    answered(conversations.selected, "one", "1")
    before = conversations.asked()
    late = answered(conversations.selected, "two", "2")
    conversations.cache_cleared(before)
    assert late.after_clearing
    assert not conversations.selected.is_cleared
    assert not conversations.selected.exchanges[0].after_clearing


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_that_is_asked_for_again_after_the_clearing_is_the_marked_one(is_late: bool) -> None:
    """Also if it was asked for while the cache was cleared."""
    conversations = Conversations()
    conversation = conversations.selected
    first = answered(conversation, "one", "1")
    stopped = conversation.ask("two")
    stopped.end(Phase.STOPPED)
    before, version = conversations.asked(), stopped.version
    if is_late:
        conversation.ask_again(stopped)
        conversations.cache_cleared(before)
    else:
        conversations.cache_cleared(before)
        conversation.ask_again(stopped)
    assert (first.after_clearing, stopped.after_clearing) == (False, True)
    assert stopped.version > version + 1
    assert not conversation.is_cleared
    stopped.end(Phase.DONE)
    assert not conversation.ask("three").after_clearing


@pytest.mark.parametrize(("num", "seconds", "rate"), [(11, 2.0, 10.0), (1, 0.5, None), (None, 0.5, None)])
def test_tokens_per_second(num: int | None, seconds: float, rate: float | None) -> None:
    measures = Measures(ttft_s=1.0, latest_s=1.0 + seconds / 2, num_tokens=num, sources=None, is_cut=False)
    assert measures.tokens_per_s == (None if rate is None else pytest.approx(rate))


def test_titles() -> None:
    conversation = Conversation(1)
    conversation.ask("What  is\na chunk?")
    assert conversation.title == "What is a chunk?"
    assert title_of(" ") == UNTITLED
    long = title_of("Tell me everything that you know about hidden states, please")
    assert long == "Tell me everything that you know about…"
    assert len(title_of("x" * 100)) == 42


def test_a_renamed_conversation_keeps_its_title() -> None:
    conversations = Conversations()
    conversations.rename(conversations.selected, "  Ships ")
    conversations.rename(conversations.selected, " ")
    conversations.selected.ask("Hello")
    assert conversations.selected.title == "Ships"


def test_new_select_delete() -> None:
    conversations = Conversations()
    first = conversations.selected
    assert conversations.new() is first  # it is empty
    answered(first, "one", "1")
    second = conversations.new()
    assert list(conversations) == [second, first]
    conversations.select(first)
    conversations.delete(first)
    assert conversations.selected is second
    for late in (conversations.select, conversations.delete):  # in a tab that still shows it
        late(first)
    assert conversations.selected is second
    conversations.delete(second)
    assert len(conversations) == 1
    assert conversations.selected.number not in (first.number, second.number)


def test_each_tab_shows_what_was_chosen_in_it() -> None:
    conversations = Conversations()
    first = conversations.selected
    answered(first, "one", "1")
    one_tab, other_tab = Selection(conversations), Selection(conversations)
    second = conversations.new()
    other_tab.choose(second)
    assert (one_tab.current, other_tab.current) == (first, second)
    assert Selection(conversations).current is second  # as after a reload
    conversations.delete(first)
    assert one_tab.current is second
    one_tab.choose(first)  # before the tab has shown that it is gone
    assert one_tab.current is second
