"""An answer's Markdown as HTML. Tags that the model wrote are shown as text: none of them reaches the page."""

from __future__ import annotations

from html import escape

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_MOST_NESTED = 100
_MOST_COLOURED = 20_000
"""Characters of a block of code; colouring a longer one, again with each piece that comes, would hold up the page."""
_CODE = "codehilite"


def answer_html(answer: str) -> str:
    """The answer so far. A block of code that has not ended yet already looks like one. Raises nothing."""
    try:
        tokens = _MARKDOWN.parse(answer)
        # What is nested deeper is left out by the parser.
        if all(token.level < _MOST_NESTED - 1 for token in tokens):
            return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))
    except Exception:  # whatever a parser does not expect of a model: one answer must not end the page
        pass
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
