"""The two timelines of a plan as a picture. Importing this imports matplotlib, which is an optional dependency."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sglang_hcache.cli.plan.report import SHOWN_NAMES, PlanReport, text_ms
from sglang_hcache.cli.report import METHOD_NAMES, counted
from sglang_hcache.core.layout import Method
from sglang_hcache.plan.timeline import Timeline

_COLOURS = {Method.HIDDEN: "#4477aa", Method.KV: "#ddaa33", Method.RECOMPUTE: "#bb5566"}
"""Also told apart by people who see few colours, and in grey."""
_IDLE = "#e4e4e4"
_LANES = {"computation": 0.0, "I/O": 1.0}
_HEIGHT = 0.7
_LABELS = ((0.018, 7.0), (0.0105, 5.5))
"""(share of the picture, points): a step at least so wide is numbered in that size; narrower ones are not."""


def draw(path: Path, report: PlanReport) -> None:
    """Write a PNG of ``report``'s plan to ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    timeline = report.plan.timeline
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_lanes(axes, timeline)
    used = [method for method in Method if method in report.plan.methods]
    counts = {method: report.plan.methods.count(method) for method in used}
    handles = [
        Patch(color=_COLOURS[method], label=f"{METHOD_NAMES[method]}: {counted(counts[method], 'layer')}")
        for method in used
    ]
    handles.append(Patch(color=_IDLE, label="idle"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False)
    axes.set_title(
        f"{report.profile.model.name}, {report.num_tokens:,} tokens, {SHOWN_NAMES[report.kind]}: "
        f"{text_ms(timeline.total_s)} ms predicted\n{report.profile.machine}",
        fontsize=10,
    )
    figure.savefig(path, format="png", dpi=150)


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    total_ms = 1e3 * timeline.total_s
    for lane, y in _LANES.items():
        axes.broken_barh([(0, total_ms)], (y - _HEIGHT / 2, _HEIGHT), color=_IDLE)
        for step in timeline.steps:
            start_s, end_s = (
                (step.read_start_s, step.read_end_s)
                if lane == "I/O"
                else (step.compute_start_s, step.compute_end_s)
            )
            if end_s <= start_s:
                continue
            start, width = 1e3 * start_s, 1e3 * (end_s - start_s)
            axes.broken_barh(
                [(start, width)],
                (y - _HEIGHT / 2, _HEIGHT),
                facecolor=_COLOURS[step.method],
                edgecolor="white",
                linewidth=0.6,
            )
            size = next((size for share, size in _LABELS if width > share * total_ms), None)
            if size is not None:
                middle = start + width / 2
                axes.text(middle, y, str(step.layer), ha="center", va="center", fontsize=size, color="white")
    idle_s = {"computation": timeline.compute_idle_s, "I/O": timeline.io_idle_s}
    names = [f"{lane}\n(idle {text_ms(idle_s[lane])} ms)" for lane in _LANES]
    axes.set_yticks(list(_LANES.values()), names)
    axes.set_xlim(0, total_ms)
    axes.set_ylim(-0.6, 1.6)
    axes.set_xlabel("ms since the restore began (numbers in the bars: layers)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
