"""What the chat page makes of an answer: nothing a model writes may break the page, restyle it or get lost."""

from __future__ import annotations

import re
import time
from html import unescape

import pytest

from sglang_hcache.cli.chat.conversation import Exchange, Phase
from sglang_hcache.cli.chat.page import answer_html as module
from sglang_hcache.cli.chat.page.answer_html import GrowingAnswer, answer_html, code_css


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("<div\n</div>", "<div\n</div>"),
        ('before <b\nclass="x">bold</b> after', '<b\nclass="x">bold</b> after'),
        ("a std::vector<int> of them", "std::vector<int> of them"),
        ("<title>seen</title> and seen", "<title>seen</title> and seen"),
        ("<style>body { display: none }</style>\n\nrest", "<style>body { display: none }</style>"),
        ('<p style="position:fixed">over</p>', '<p style="position:fixed">over</p>'),
        ('<form action="http://a.b"><input></form>', '<form action="http://a.b"><input></form>'),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("<!-- hidden -->\n\n<?php ?>", "<!-- hidden -->"),
        ("a" + "\t" * 1000 + "b", "\t" * 1000 + "b"),
        (">" * 200 + " deep", "deep"),
        ("- " * 200 + "deep", "deep"),
        ("> - " * 100 + "deep", "deep"),
        ("[1]: http://a.b" + " " * 2000 + "c", "[1]: http://a.b"),
        ("[" * 2000 + "x", "[" * 2000 + "x"),
        ("![" * 500 + "x", "![" * 500 + "x"),
        ("*a " * 2000, "*a *a"),
        ("a " + "`" * 2001 + "x", "`x"),
        ("<" * 5000, "<" * 5000),
        ("| a |" * 300 + "\n" + "|-|" * 300, "a"),
    ],
)
def test_whatever_a_model_writes_is_shown_as_text(answer: str, said: str) -> None:
    began = time.process_time()
    html = answer_html(answer)
    assert time.process_time() - began < 5  # a parser that goes over it again and again takes minutes
    assert said in text_of(html)
    assert not re.search(r"<(div|b|title|style|form|input|script|int|\?|!--)", html)


def test_what_the_parser_fails_at_is_shown_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise AssertionError

    monkeypatch.setattr(module, "_MARKDOWN", fails)
    assert answer_html("a\n<b>") == '<p class="plain">a\n&lt;b&gt;</p>'


def test_markdown() -> None:
    html = answer_html("# T\n\n- x\n- y\n\n1. z\n\na  \nb\n\n| a | b |\n|:-|-:|\n| 1 | 2 |\n\n**f** `g<h>`")
    for part in ("<h1>T</h1>", "<li>x</li>", "<ol>", "a<br>\nb", '<td style="text-align:right">2</td>'):
        assert part in html
    assert "<strong>f</strong> <code>g&lt;h&gt;</code>" in html
    assert '<a href="http://a.b/c">d</a>' in answer_html("[d](http://a.b/c)")
    assert "<a" not in answer_html("[d](javascript:alert(1)) http://a.b")


def test_code() -> None:
    html = answer_html("```python\n\ndef f(): return '<b>'\n```\nafter")
    assert '<pre class="codehilite"><code>' in html
    assert '<span class="k">def</span>' in html
    assert text_of(html) == "\ndef f(): return '<b>'\n\nafter\n"
    assert ".codehilite .k" in code_css()
    assert ".body--dark .codehilite .k" in code_css()


def test_code_of_no_known_language_or_too_long_to_colour() -> None:
    assert '<pre><code class="language-klingon">a &lt; b\n</code></pre>' in answer_html(
        "```klingon\na < b\n```"
    )
    long = answer_html("```python\n" + "def f(): pass\n" * 5000 + "```")
    assert "<span" not in long
    assert long.count("def f()") == 5000


@pytest.mark.parametrize(
    "answer", ["See\n```", "See\n```c\nx < 1", "See\n```c\nx < 1\n```", "See\n~~~\nx < 1"]
)
def test_a_block_of_code_that_has_not_ended_is_one(answer: str) -> None:
    html = answer_html(answer)
    assert html.count("<pre") == html.count("</pre>") == 1
    assert html.startswith("<p>See</p>")


class Costly:
    """Stands for ``answer_html``; takes ``seconds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0
        self.now = 100.0
        monkeypatch.setattr(module, "answer_html", self)
        monkeypatch.setattr(module, "time", self)

    def __call__(self, answer: str) -> str:
        self.calls += 1
        self.now += self.seconds
        return f"<p>{answer}</p>"

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic


def test_while_an_answer_comes_it_is_laid_out_as_often_as_the_page_can_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costly = Costly(monkeypatch, 0.2)
    exchange = Exchange("q", answer="a", phase=Phase.STREAMING)
    shown = GrowingAnswer(exchange)
    assert (shown.html(), shown.is_behind) == ("<p>a</p>", False)
    exchange.answer = "ab"
    costly.now += 0.9
    assert (shown.html(), shown.is_behind) == ("<p>a</p>", True)
    costly.now += 0.2
    assert (shown.html(), shown.is_behind) == ("<p>ab</p>", False)
    exchange.answer = "abc"
    exchange.phase = Phase.DONE  # all of it at once
    assert (shown.html(), shown.is_behind, costly.calls) == ("<p>abc</p>", False, 3)
    assert shown.html() == "<p>abc</p>"
    assert costly.calls == 3


def test_an_answer_that_holds_up_the_page_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = Costly(monkeypatch, 0.6)
    exchange = Exchange("q", answer="<a", phase=Phase.STREAMING)
    shown = GrowingAnswer(exchange)
    assert shown.html() == "<p><a</p>"
    exchange.answer, exchange.phase = "<ab", Phase.DONE
    for tab in (shown, GrowingAnswer(exchange)):
        costly.now += 10
        assert tab.html() == '<p class="plain">&lt;ab</p>'
    exchange.begin_again()
    exchange.answer = "c"
    assert shown.html() == "<p>c</p>"
    assert costly.calls == 2


def test_a_very_long_answer_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    costly = Costly(monkeypatch, 0.0)
    exchange = Exchange("q", answer="a" * 60_000, phase=Phase.DONE)
    assert GrowingAnswer(exchange).html() == f'<p class="plain">{exchange.answer}</p>'
    assert costly.calls == 0
