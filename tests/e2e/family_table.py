"""The support table in ``docs/families.md``, between two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "docs" / "families.md"
BEHIND = 1e-3
"""What the model computes behind a restored prefix may differ by this much of the largest value, in float32."""
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"
_HEADER = (
    *("family", "class in SGLang", "attention", "hidden states", "K and V", "first layers"),
    *("restored tokens", "equal", "self-check error"),
)
"""Only the last column depends on the machine."""


def render(seen: dict[str, Any]) -> list[str]:
    """The row of one family, from what ``family_check.py`` printed."""
    heads, kv_heads = seen["heads"], seen["kv_heads"]
    methods = [str(seen["projector"] or f"no: {seen['why_not_hidden']}")]
    methods.append("yes" if "kv" in seen["self_check"] else "no")
    methods.append("recomputed" if seen["may_recompute"] else "not recomputed")
    equal = all(error <= seen["tolerance"] for error in seen["self_check"].values())
    equal = equal and all(error <= BEHIND for error in seen["continued"].values())
    return [
        seen["family"],
        f"`{seen['architecture']}`",
        "MHA" if heads == kv_heads else "GQA",
        *methods,
        str(seen["restored_tokens"]),
        "yes" if equal else "no",
        f"{seen['self_check'].get('hidden', 0.0):.1g}",
    ]


def written(text: str, rows: list[list[str]]) -> str:
    """``text`` with its table replaced."""
    before, _, rest = text.partition(_BEGIN)
    lines = [_line(_HEADER), _line(["---"] * len(_HEADER)), *map(_line, rows)]
    return before + _BEGIN + "\n" + "\n".join(lines) + "\n" + _END + rest.partition(_END)[2]


def stable(text: str) -> list[list[str]]:
    """The rows of the table in ``text``, without what depends on the machine."""
    lines = text.partition(_BEGIN)[2].partition(_END)[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")][:-1] for line in lines]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
