"""What the chat page makes of an answer: nothing a model writes may break the page, restyle it or get lost."""

from __future__ import annotations

import re
import time
from html import unescape

import pytest

from sglang_hcache.cli.chat.page import answer_html as module
from sglang_hcache.cli.chat.page.answer_html import answer_html, code_css


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
