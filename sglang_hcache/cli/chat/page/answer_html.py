"""An answer's Markdown as HTML. Tags that the model wrote are shown as text: none of them reaches the page."""

from __future__ import annotations

import time
from html import escape

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from sglang_hcache.cli.chat.conversation import Exchange

_MOST_NESTED = 100
_MOST_COLOURED = 20_000
"""Characters of a block of code; colouring a longer one, again with each piece that comes, would hold up the page."""
_CODE = "codehilite"
_LONGEST = 50_000
"""Characters of an answer; a longer one is shown as text."""
_LONGEST_S = 0.5
_REST = 5.0
"""After an answer was laid out, how many times as long nothing is, while more of it comes: others share the page."""


class GrowingAnswer:
    """An answer's HTML for one tab, which may be behind the answer for a moment so that the page stays quick."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._answer = ""
        self._html = ""
        self._next_at = 0.0

    @property
    def is_behind(self) -> bool:
        return self._answer != self._exchange.answer

    def html(self) -> str:
        """The newest there is by now; of an answer that has ended all of it."""
        exchange, now = self._exchange, time.monotonic()
        if not self.is_behind or (exchange.phase.is_open and now < self._next_at):
            return self._html
        self._answer = exchange.answer
        if exchange.is_plain or len(exchange.answer) > _LONGEST:
            self._html = _plain(exchange.answer)
            return self._html
        began = time.thread_time()
        self._html = answer_html(exchange.answer)
        took_s = time.thread_time() - began
        self._next_at = now + (1 + _REST) * took_s
        exchange.is_plain = took_s > _LONGEST_S
        return self._html


def answer_html(answer: str) -> str:
    """The answer so far. A block of code that has not ended yet already looks like one. Raises nothing."""
    try:
        tokens = _MARKDOWN.parse(answer)
        # What is nested deeper is left out by the parser.
        if all(token.level < _MOST_NESTED - 1 for token in tokens):
            return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))
    except Exception:  # whatever a parser does not expect of a model: one answer must not end the page
        pass
    return _plain(answer)


def _plain(answer: str) -> str:
    return f'<p class="plain">{escape(answer)}</p>'


def code_css() -> str:
    """Colours of code, in the light and in the dark."""
    light = HtmlFormatter(nobackground=True).get_style_defs(f".{_CODE}")
    dark = HtmlFormatter(nobackground=True, style="github-dark").get_style_defs(f".body--dark .{_CODE}")
    return f"{light}\n{dark}"


def _coloured(code: str, language: str, _: str) -> str:
    """A block of code as HTML; empty: as it is."""
    if len(code) > _MOST_COLOURED:
        return ""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return ""
    coloured = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return f'<pre class="{_CODE}"><code>{coloured}</code></pre>'


_MARKDOWN = MarkdownIt("js-default", {"maxNesting": _MOST_NESTED, "html": False, "highlight": _coloured})
