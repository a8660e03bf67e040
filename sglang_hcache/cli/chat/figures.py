"""Bars, strips and tables of the page, as HTML with every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sglang_hcache.cli.chat.conversation import Exchange, Measures, Phase
from sglang_hcache.cli.chat.watch import Look, Reach
from sglang_hcache.cli.report import METHOD_NAMES, counted, restore_times, seconds_text
from sglang_hcache.cli.server.answers import TokenSources
from sglang_hcache.cli.server.client import FOREIGN_ERRORS, FOREIGN_STATE
from sglang_hcache.cli.unwell import directory_problems
from sglang_hcache.core.layout import Method
from sglang_hcache.core.metrics import events_of
from sglang_hcache.core.units import format_bytes

_SOURCE_NAMES = {"device": "GPU", "host": "host", "disk": "disk", "recomputed": "recomputed"}
_RESULT_NAMES = {
    "done": "done",
    "failed": "failed",
    "late": "late",
    "try_late": "tried in vain",
    "failed_on_another_rank": "failed on another rank",
    "aborted": "aborted",
    "predicted_slower": "not started: predicted slower",
    "no_slots": "not started: no room in the KV pool",
}
_PHASE_NAMES = {
    "queue": "waiting to begin",
    "read": "reading",
    "project": "writing K and V",
    "recompute": "recomputing layers",
}
_LOST = ("failed", "late", "failed_on_another_rank")


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar."""

    kind: str
    """Its CSS class."""
    name: str
    count: int
    percent: float


def source_segments(sources: TokenSources) -> list[BarPart]:
    """Where a prompt's tokens came from, nearest place first; also what nothing came from."""
    whole = max(1, sources.prompt)
    return [
        BarPart(kind, name, getattr(sources, kind), 100 * getattr(sources, kind) / whole)
        for kind, name in _SOURCE_NAMES.items()
    ]


def sources_html(sources: TokenSources) -> str:
    """A stacked bar of a prompt's tokens with its numbers below."""
    segments = source_segments(sources)
    said = ", ".join(f"{segment.count:,} {segment.name}" for segment in segments)
    parts = "".join(
        f'<span class="seg c-{segment.kind}" style="width:{segment.percent:.3f}%"></span>'
        for segment in segments
        if segment.count
    )
    keys = "".join(
        f'<span class="key{"" if segment.count else " none"}"><i class="dot c-{segment.kind}"></i>'
        f"{segment.name} <b>{segment.count:,}</b></span>"
        for segment in segments
    )
    label = f"Prompt of {counted(sources.prompt, 'token')} by source: {said}"
    bar = f'<div class="bar" role="img" aria-label="{label}">{parts}</div>'
    return f'{bar}<div class="keys" aria-hidden="true">{keys}</div>'


def measures_text(measures: Measures) -> str:
    """TTFT, speed and lengths on one line."""
    parts = []
    if measures.ttft_s is not None:
        parts.append(f"TTFT {seconds_text(measures.ttft_s)}")
    if measures.tokens_per_s is not None:
        parts.append(f"{measures.tokens_per_s:.1f} tokens/s")
    if measures.num_tokens:
        parts.append(f"{counted(measures.num_tokens, 'token')} answered")
    return " · ".join(parts)


def exchange_html(exchange: Exchange) -> str:
    """What stands below an answer: measures and the bar. Empty while nothing is known."""
    measures = exchange.measures
    if measures is None or measures.ttft_s is None:
        return ""
    text = measures_text(measures)
    if exchange.phase is Phase.STOPPED:
        text += " · stopped"
    elif exchange.phase is Phase.DONE and measures.is_cut:
        text += " (as many as were asked for)"
    found = f'<div class="measures">{escape(text)}</div>'
    if measures.sources is not None:
        return found + sources_html(measures.sources)
    if not exchange.phase.is_open:
        return (
            found
            + '<div class="hint">The server says at the end of an answer where its prompt came from.</div>'
        )
    return found


def trouble_text(look: Look) -> str:
    """What to say above the field; empty if nothing is wrong."""
    if look.reach is Reach.AWAY:
        return (
            f"{look.problem}. Your conversations stay here; this page tries again every second. "
            "What the server was answering can be asked again."
        )
    if look.reach is Reach.BUSY:
        return f"The server is busy: {look.problem}. Answers come when it is done."
    return ""


# -- the tier ------------------------------------------------------------------------------------


def tier_html(look: Look) -> str:
    """The tier's state, or the line that says which flag the server lacks."""
    if look.tier is None:
        if not look.model:
            return '<p class="hint">Nothing is known of the server yet.</p>'
        return (
            '<p class="lack">This server runs without the tier. Start it with '
            "<code>--hierarchical-cache hcache</code> (<code>hcache serve</code> adds it).</p>"
        )
    try:
        return _state_html(look, look.tier)
    except FOREIGN_ERRORS:
        return f'<p class="lack">{FOREIGN_STATE}.</p>'


def _state_html(look: Look, tier: Mapping[str, Any]) -> str:
    return "".join(
        (
            _sizes_html(tier),
            _hits_html(tier["counters"]),
            _restores_html(tier["counters"], tier["measures"]),
            _layers_html(look),
            _phases_html(tier["measures"]),
        )
    )


def _section(title: str, content: str) -> str:
    return f"<section><h3>{title}</h3>{content}</section>"


def _sizes_html(state: Mapping[str, Any]) -> str:
    host, disk = state["host"], state["disk"]
    used, chunks = host["slots"] - host["free"], host["clean"] + host["dirty"]
    note = (
        f"{host['dirty']:,} of them not on disk yet" if disk is not None else "no disk tier (--hcache-dirs)"
    )
    note += f" · {used - chunks:,} more unfinished" if used > chunks else ""
    size, capacity = used * host["chunk_bytes"], host["slots"] * host["chunk_bytes"]
    found = _tier_html("host", "Host memory", size, capacity, chunks, note)
    if disk is not None:
        note = f"{format_bytes(disk['written_today_bytes'])} written in 24 h"
        found += _tier_html("disk", "Disk", disk["bytes"], disk["cap_bytes"], disk["chunks"], note)
        found += "".join(f'<p class="lack">{escape(problem)}</p>' for problem in directory_problems(state))
    return _section("What the tier holds", found)


def _tier_html(kind: str, name: str, used: int, capacity: int, chunks: int, note: str) -> str:
    percent = min(100.0, 100 * used / max(1, capacity))
    size = f"{format_bytes(used)} of {format_bytes(capacity)}"
    return (
        f'<div class="tier"><div class="line"><span>{name}</span><b>{size}</b></div>'
        f'<div class="bar thin" role="img" aria-label="{name}: {size} used">'
        f'<span class="seg c-{kind}" style="width:{percent:.2f}%"{"" if used else " hidden"}></span></div>'
        f'<div class="hint">{counted(chunks, "chunk")} · {escape(note)}</div></div>'
    )


def _hits_html(counters: Mapping[str, int]) -> str:
    looked, found = counters.get("lookup.requests", 0), counters.get("lookup.hits", 0)
    if not looked:
        return _section("Hit ratio", '<p class="hint">No request looked into the tier yet.</p>')
    return _section(
        "Hit ratio",
        f'<div class="line"><span class="big">{found / looked:.0%}</span>'
        f'<span class="hint">{found:,} of {counted(looked, "request")} found<br>something in the tier</span></div>',
    )


def _restores_html(counters: Mapping[str, int], measures: Mapping[str, Any]) -> str:
    rows = []
    for event, result in events_of("restores").items():
        count = counters.get(event, 0)
        if count or result == "done":
            style = " bad" if result in _LOST else ""
            rows.append(_row(_RESULT_NAMES.get(result, result), f"{count:,}", style))
    for tier in ("host", "disk"):
        tokens = counters.get(f"restore.tokens_{tier}", 0)
        rows.append(_row(f"tokens from {'host memory' if tier == 'host' else tier}", f"{tokens:,}"))
    saved_s = measures.get("restore.saved_seconds", {}).get("sum", 0.0)
    rows.append(_row("seconds saved (predicted)", f"{saved_s:,.1f}"))
    return _section("Restores since the start", "".join(rows))


def _row(name: str, value: str, style: str = "") -> str:
    return f'<div class="line{style}"><span>{escape(name)}</span><b>{escape(value)}</b></div>'


def _layers_html(look: Look) -> str:
    return _section("Plan: what each layer stores", strip_html(look.layers))


def strip_html(layers: Sequence[Method]) -> str:
    """One cell a layer in the colour of its method, and a legend."""
    cells = "".join(
        f'<span class="cell c-{method}" title="layer {number}: {METHOD_NAMES[method]}"></span>'
        for number, method in enumerate(layers)
    )
    used = [method for method in Method if method in layers]
    said = [f"{METHOD_NAMES[method]}: {counted(layers.count(method), 'layer')}" for method in used]
    keys = "".join(
        f'<span class="key"><i class="dot c-{method}"></i>{text}</span>'
        for method, text in zip(used, said, strict=True)
    )
    label = f"{counted(len(layers), 'layer')}; {', '.join(said)}"
    return (
        f'<div class="strip" role="img" aria-label="{label}">{cells}</div>'
        f'<div class="line ends" aria-hidden="true"><span>layer 0</span><span>{len(layers) - 1}</span></div>'
        f'<div class="keys" aria-hidden="true">{keys}</div>'
    )


def _phases_html(measures: Mapping[str, Any]) -> str:
    rows = [_row(_PHASE_NAMES[phase], seconds_text(seconds)) for phase, seconds in restore_times(measures)]
    found = "".join(rows) if rows else '<p class="hint">No restore ended yet.</p>'
    return _section("Time of a restore, on average", found)
