"""The picture of restore_speed.py: tokens/s over the history, and over the bandwidth: Figures 11 and 12 of HCache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from restoring.settings import split_tier

Row = Mapping[str, Any]
"""Of the results."""
COLOURS = {
    "recompute": "tab:gray",
    "kv": "tab:orange",
    "hidden": "tab:green",
    "hybrid": "tab:purple",
    "auto": "tab:blue",
    "ideal": "black",
}


def bandwidth_length(rows: Sequence[Row]) -> int | None:
    """The longest history that was read at two bandwidths at least; None if there is none."""
    limits: dict[int, set[int]] = {}
    for row in rows:
        if (limit := split_tier(row["tier"])[1]) is not None:
            limits.setdefault(row["length"], set()).add(limit)
    return max((length for length, found in limits.items() if len(found) > 1), default=None)


def draw(path: Path, rows: Sequence[Row], model: str) -> None:
    """A panel over length for each tier with several lengths, and one over bandwidth where there are several.

    Args:
        model: goes above the panels.
    """
    from matplotlib.figure import Figure

    panels: list[Callable[[Any], None]] = []
    for tier in dict.fromkeys(row["tier"] for row in rows):
        of_tier = [row for row in rows if row["tier"] == tier]
        if len({row["length"] for row in of_tier}) > 1 or split_tier(tier)[1] is None:
            panels.append(lambda axis, of_tier=of_tier: _over_length(axis, of_tier))  # type: ignore[misc]
    length = bandwidth_length(rows)
    if length is not None:
        panels.append(lambda axis: _over_bandwidth(axis, [row for row in rows if row["length"] == length]))
    if not panels:
        panels.append(lambda axis: _over_length(axis, rows))
    figure = Figure(figsize=(5 * len(panels), 4.2))
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel(axis)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(f"Restore speed, {model}")
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def _over_length(axis: Any, rows: Sequence[Row]) -> None:
    _lines(axis, rows, lambda row: row["length"])
    lengths = sorted({row["length"] for row in rows})
    axis.set(title=rows[0]["tier"], xlabel="tokens of the history")
    _ticks(axis, lengths, [f"{length:,}" for length in lengths])


def _over_bandwidth(axis: Any, rows: Sequence[Row]) -> None:
    limits = {row["tier"]: limit / 1e6 for row in rows if (limit := split_tier(row["tier"])[1]) is not None}
    limited = [row for row in rows if row["tier"] in limits]
    _lines(axis, limited, lambda row: limits[row["tier"]])
    axis.set(title=f"{limited[0]['length']:,} tokens, disk throttled", xlabel="MB/s")
    places = sorted(set(limits.values()))
    _ticks(axis, places, [f"{place:g}" for place in places])


def _lines(axis: Any, rows: Sequence[Row], where: Callable[[Row], float]) -> None:
    for variant in dict.fromkeys(row["variant"] for row in rows):
        chosen = sorted((row for row in rows if row["variant"] == variant), key=where)
        axis.plot(
            [where(row) for row in chosen],
            [row["tokens_per_s"] for row in chosen],
            "--" if variant == "ideal" else "o-",
            label="the last 64 tokens alone" if variant == "ideal" else variant,
            color=COLOURS[variant],
            linewidth=2.5 if variant == "auto" else 1.5,
            markersize=4,
        )


def _ticks(axis: Any, places: Sequence[float], labels: Sequence[str]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log")
    axis.set_xticks(places, labels)
    axis.xaxis.set_minor_locator(NullLocator())
