"""Schedules and storage: [HCache Table 3] from the numbers that the paper prints, and what this machine would have.

The paper prints, for each model, a schedule, what it stores of a token, and the bandwidth at which reading hidden
states would balance projecting them. That balance is the only measure of projection speed it gives: projecting one
layer takes as long as reading it at that bandwidth. Its storage (four drives) is taken to deliver about 26 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.layout import Method
from sglang_hcache.plan.costs import Hardware, LayerCosts
from sglang_hcache.plan.planner import Split, closed_form, plan_stored, search, stored_bytes
from sglang_hcache.plan.profile import Profile, analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES
from sglang_hcache.plan.stored import PLANNED_TOKENS, planned_costs

STORAGE_GB_S = 26.0
TOKENS = 1024


@dataclass(frozen=True)
class Printed:
    """One column of the paper's table."""

    model: str
    balanced_gb_s: float
    split: Split
    kib_per_token: int
    """One byte a value, as the table counts."""


PAPER = (
    Printed("llama2-7b", 24, Split(0, 31, 1), 132),
    Printed("llama2-13b", 21, Split(0, 36, 4), 210),
    Printed("opt-30b", 37, Split(8, 40, 0), 280),
)


@dataclass(frozen=True)
class ScheduleRow:
    """One model: schedules by each way to choose, and the storage of ``stored``."""

    model: str
    where: str
    """``paper``, or the tier that was measured here."""
    tokens: int
    printed: Split | None
    closed_form: Split | None
    """Without the pipeline's fill; None where its assumptions do not hold."""
    searched: Split
    """The fastest of all, without the fill."""
    searched_with_fill: Split
    stored: Split
    """Whose storage is counted: what the paper prints; here what a server with ``auto`` stores."""
    bytes_per_token: int
    kv_bytes_per_token: int
    printed_kib: int | None = None
    """What the paper prints, one byte a value."""

    @property
    def ratio(self) -> float:
        """Storage of K and V over that of ``stored``."""
        return self.kv_bytes_per_token / self.bytes_per_token


def paper_costs(printed: Printed, io_gb_s: float = STORAGE_GB_S) -> LayerCosts:
    """C_hidden = N·D·2 bytes / balanced bandwidth = 4·N·D² / FLOP/s: so many FLOP/s."""
    shape = NAMED_SHAPES[printed.model]
    flops = 2 * shape.hidden_size * printed.balanced_gb_s * 1e9
    return analytic_profile(shape, Hardware(flops=flops, io_bytes_per_s=io_gb_s * 1e9)).costs(
        {"disk": TOKENS}
    )


def paper_rows() -> list[ScheduleRow]:
    """The paper's three models."""
    rows = []
    for printed in PAPER:
        shape = NAMED_SHAPES[printed.model]
        stored = printed.split
        rows.append(
            ScheduleRow(
                model=printed.model,
                where="paper",
                tokens=TOKENS,
                printed=printed.split,
                **_schedules(paper_costs(printed), shape.num_layers),
                stored=stored,
                bytes_per_token=stored_bytes(shape, stored.methods()),
                kv_bytes_per_token=stored_bytes(shape, (Method.KV,) * shape.num_layers),
                printed_kib=printed.kib_per_token,
            )
        )
    return rows


def measured_row(profile: Profile, tier: str) -> ScheduleRow:
    """What the planner says of ``profile`` when all tokens come from ``tier``."""
    shape = profile.model
    costs = profile.costs({tier: PLANNED_TOKENS})
    stored = Split.of(plan_stored(planned_costs(profile, tier), shape.num_layers))
    return ScheduleRow(
        model=f"{shape.num_layers} layers, {shape.hidden_size} wide",
        where=tier,
        tokens=PLANNED_TOKENS,
        printed=None,
        **_schedules(costs, shape.num_layers),
        stored=stored,
        bytes_per_token=stored_bytes(shape, stored.methods()),
        kv_bytes_per_token=stored_bytes(shape, (Method.KV,) * shape.num_layers),
    )


def _schedules(costs: LayerCosts, num_layers: int) -> dict[str, Any]:
    try:
        form = closed_form(costs, num_layers)
    except ValueError:
        form = None
    return {
        "closed_form": form,
        "searched": search(costs, num_layers, with_fill=False).split,
        "searched_with_fill": search(costs, num_layers).split,
    }
