"""What ``hcache plan`` prints: tables for people, one object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sglang_hcache.cli.plan.capacity import Sizing
from sglang_hcache.cli.plan.server import LONGEST, ServerPlan, decision_data
from sglang_hcache.cli.report import METHOD_NAMES, counted, new_table
from sglang_hcache.core.layout import Method, PlanKind
from sglang_hcache.plan.planner import (
    Plan,
    Split,
    plan_stored,
    search,
    stored_bytes,
)
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.plan.stored import PLANNED_TOKENS
from sglang_hcache.restore.decision import OVERHEAD_S

SHOWN_NAMES = {
    PlanKind.AUTO: "hcache",
    PlanKind.HIDDEN: "hidden",
    PlanKind.KV: "kv",
    PlanKind.HYBRID: "hybrid",
    PlanKind.RECOMPUTE: "recompute",
}
"""Kind of a plan -> what tables and JSON call it. ``hcache`` is ``--method auto``."""
_MAY_MIX = {
    PlanKind.AUTO: "may mix all three",
    PlanKind.HIDDEN: "hidden states only",
    PlanKind.KV: "K and V only",
    PlanKind.HYBRID: "K and V, recomputing",
    PlanKind.RECOMPUTE: "no tier",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All that is said about one model, machine and length."""

    profile: Profile
    tier: str
    num_tokens: int
    kind: PlanKind
    """Whose plan is shown in full."""
    plans: Mapping[PlanKind, Plan]
    stored: tuple[Method, ...]
    """What each layer has to store so that restores of every length can be planned."""
    why_not_hidden: str | None
    """Why no plan has hidden states; None: some may have them."""
    sizing: Sizing

    @property
    def plan(self) -> Plan:
        return self.plans[self.kind]

    @property
    def server(self) -> ServerPlan:
        """What ``--hcache-method auto`` does on a server, whatever ``kind`` is."""
        return ServerPlan.of(self.profile)

    @property
    def _server_bytes(self) -> int:
        """That a server stores of one token: with ``auto`` its own mix, else that of ``kind``."""
        return stored_bytes(
            self.profile.model, self.server.stored if self.kind is PlanKind.AUTO else self.stored
        )

    def data(self) -> dict[str, Any]:
        """For programs. Times in milliseconds, sizes in bytes."""
        shape, timeline = self.profile.model, self.plan.timeline
        kv_bytes = stored_bytes(shape, (Method.KV,) * shape.num_layers)
        plan_bytes = stored_bytes(shape, self.plan.methods)
        return {
            "model": shape.name,
            "costs": str(self.profile.source),
            "machine": self.profile.machine,
            "tier": self.tier,
            "tokens": self.num_tokens,
            "method": str(self.kind),
            "why_not_hidden": self.why_not_hidden,
            "layers": _counts(self.plan.split),
            "layer_ranges": [
                {"first": first, "last": last, "method": str(method)}
                for first, last, method in _ranges(self.plan.methods)
            ],
            "bytes_per_token": plan_bytes,
            "kv_bytes_per_token": kv_bytes,
            "kv_over_plan_bytes": kv_bytes / plan_bytes if plan_bytes else None,
            "stored": {
                "layers": _counts(Split.of(self.stored)),
                "bytes_per_token": stored_bytes(shape, self.stored),
            },
            "predicted_ms": {SHOWN_NAMES[kind]: _ms(plan.total_s) for kind, plan in self.plans.items()},
            "speed_up": {
                SHOWN_NAMES[kind]: plan.total_s / self.plan.total_s for kind, plan in self.plans.items()
            },
            "busy_ms": {"compute": _ms(timeline.compute_s), "io": _ms(timeline.io_s)},
            "idle_ms": {"compute": _ms(timeline.compute_idle_s), "io": _ms(timeline.io_idle_s)},
            "fill_ms": _ms(timeline.fill_s),
            "server": {
                **self.server.data(),
                **decision_data(self.server.restore(self.tier, self.num_tokens)),
                "pays_from_tokens": self.server.pays_from(self.tier),
            },
            "sizes": self.sizing.data(self._server_bytes),
        }

    def parts(self) -> list[RenderableType]:
        """For people."""
        history = f"A history of {counted(self.num_tokens, 'token')}; {self.profile.machine}."
        return [
            Text(shape_text(self.profile.model), "bold"),
            Text(history),
            *self._range_note(),
            *([] if self.why_not_hidden is None else [Text(f"No hidden states: {self.why_not_hidden}.")]),
            Text(""),
            self._table(),
            Text(""),
            *(Text(line) for line in self._lines()),
        ]

    def _range_note(self) -> list[Text]:
        measured = self.profile.token_range
        if measured is None or measured[0] <= self.num_tokens <= measured[1]:
            return []
        text = f"The profile was measured from {measured[0]:,} to {measured[1]:,} tokens: beyond that it guesses."
        return [Text(text, "yellow")]

    def _table(self) -> Table:
        numbers = ["hidden", "K and V", "recomputed", "bytes a token", "ms", "times the plan"]
        table = new_table(["method", *numbers, ""], set(numbers))
        for kind, plan in self.plans.items():
            split = plan.split
            table.add_row(
                SHOWN_NAMES[kind],
                str(split.hidden),
                str(split.kv),
                str(split.recompute),
                f"{stored_bytes(self.profile.model, plan.methods):,}",
                text_ms(plan.total_s),
                f"{plan.total_s / self.plan.total_s:.2f}",
                "<- the plan" if kind is self.kind else _MAY_MIX[kind],
                style="bold" if kind is self.kind else "",
            )
        return table

    def _lines(self) -> list[str]:
        timeline = self.plan.timeline
        return [
            f"Layers    {_ranges_text(self.plan.methods)}",
            f"Compute   busy {text_ms(timeline.compute_s)} ms, idle {text_ms(timeline.compute_idle_s)} ms",
            f"I/O       busy {text_ms(timeline.io_s)} ms, idle {text_ms(timeline.io_idle_s)} ms",
            *self._storage(),
            *self._server(),
            *self.sizing.lines(self._server_bytes),
        ]

    def _server(self) -> list[str]:
        server = self.server
        decision = server.restore(self.tier, self.num_tokens)
        restore, recompute = text_ms(decision.restore_s), text_ms(decision.recompute_s)
        overhead = f"{text_ms(OVERHEAD_S)} ms"
        does = (
            f"recomputes {counted(decision.num_recompute, 'layer')} in this restore: {restore} ms with {overhead} of "
            f"overhead; recomputing all {recompute} ms"
            if decision.pays()
            else f"recomputes this history in {recompute} ms: restoring would take {restore} ms, {overhead} of it "
            "overhead"
        )
        pays_from = server.pays_from(self.tier)
        pays = (
            f"never: a server with auto recomputes all histories of up to {LONGEST:,} tokens"
            if pays_from is None
            else f"from {pays_from:,} tokens on: a server with auto restores those histories"
        )
        return [
            f"Server    with auto it stores {split_text(server.split)}, its best mix for {PLANNED_TOKENS:,} tokens "
            f"from {server.tier},",
            f"          and {does}",
            f"Pays      {pays}",
        ]

    def _storage(self) -> list[str]:
        shape = self.profile.model
        kv_bytes = stored_bytes(shape, (Method.KV,) * shape.num_layers)
        used, kept = stored_bytes(shape, self.plan.methods), stored_bytes(shape, self.stored)
        if not used:
            return ["Storage   none"]
        lines = [f"Storage   {used:,} bytes a token, {_compared(used, kv_bytes)} K and V of all layers"]
        if kept != used:
            lines.append(
                f"          {kept:,} if recomputed layers are stored, too: longer histories want them"
            )
        return lines


def make_report(
    profile: Profile,
    tier: str,
    num_tokens: int,
    kind: PlanKind,
    why_not_hidden: str | None,
    sizing: Sizing,
) -> PlanReport:
    """Plan all kinds for ``num_tokens`` tokens in ``tier``; show the one of ``kind`` in full.

    Args:
        why_not_hidden: given where hidden states are not used; then ``profile`` must make them expensive.
    """
    num_layers = profile.model.num_layers
    costs = profile.costs({tier: num_tokens})
    kinds = [each for each in PlanKind if each is not PlanKind.HIDDEN or why_not_hidden is None]
    plans = {each: search(costs, num_layers, each) for each in kinds}
    stored = plan_stored(costs, num_layers, kind)
    return PlanReport(
        profile=profile,
        tier=tier,
        num_tokens=num_tokens,
        kind=kind,
        plans=plans,
        stored=stored,
        why_not_hidden=why_not_hidden,
        sizing=sizing,
    )


def _counts(split: Split) -> dict[str, int]:
    return {"hidden": split.hidden, "kv": split.kv, "recompute": split.recompute}


def _ms(seconds: float) -> float:
    return 1e3 * seconds


def _compared(size: int, other: int) -> str:
    if size == other:
        return "as much as"
    return f"{other / size:.2f} times less than" if size < other else f"{size / other:.2f} times as much as"


def text_ms(seconds: float) -> str:
    """Milliseconds with three digits or more, without the unit; less than a nanosecond is rounding."""
    if seconds < 1e-9:
        return "0"
    return f"{_ms(seconds):,.1f}" if seconds >= 0.01 else f"{_ms(seconds):.3g}"


def shape_text(shape: ModelShape) -> str:
    """A model's name and sizes."""
    kv_heads = f", {shape.num_kv_heads} KV heads" if shape.num_kv_heads != shape.num_heads else ""
    of_kv = f", {shape.kv_dtype_bytes} of K and V" if shape.kv_dtype_bytes != shape.hidden_dtype_bytes else ""
    return (
        f"{shape.name}: {shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_heads} heads{kv_heads}, "
        f"{shape.hidden_dtype_bytes} bytes a value{of_kv}"
    )


def split_text(split: Split) -> str:
    """``"31 hidden states + 1 K and V"``."""
    parts = [
        f"{count} {METHOD_NAMES[method]}"
        for method, count in (
            (Method.HIDDEN, split.hidden),
            (Method.KV, split.kv),
            (Method.RECOMPUTE, split.recompute),
        )
        if count
    ]
    return " + ".join(parts)


def _ranges(methods: tuple[Method, ...]) -> list[tuple[int, int, Method]]:
    """(first layer, last layer, method) of each piece of equal methods."""
    starts = [layer for layer, method in enumerate(methods) if layer == 0 or methods[layer - 1] is not method]
    ends = [start - 1 for start in starts[1:]] + [len(methods) - 1]
    return [(start, end, methods[start]) for start, end in zip(starts, ends, strict=True)]


def _ranges_text(methods: tuple[Method, ...]) -> str:
    """``"0-1 K and V, 2-31 hidden states"``."""
    return ", ".join(
        f"{first if first == last else f'{first}-{last}'} {METHOD_NAMES[method]}"
        for first, last, method in _ranges(methods)
    )
