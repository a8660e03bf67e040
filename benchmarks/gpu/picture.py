"""One picture of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(data: dict[str, Any], path: Path) -> None:
    """Bars of the kernel beside a plain copy, of efficiency, and of times by method; what is missing is left out."""
    figure, axes = plt.subplots(1, 3, figsize=(18, 6))
    parts = data["parts"]
    kernel = _numbers(parts.get("kernel", {}), "of_a_plain_copy")
    _bars(axes[0], kernel, "kernel: share of a plain copy's speed")
    _bars(axes[1], _numbers(parts.get("restores", {}), "efficiency"), "restores: max(copy, compute) / time")
    times = {
        f"{name.removeprefix('model ')}, {method}": value
        for name, part in parts.items()
        if name.startswith("model ")
        for method, value in _model_times(part).items()
    }
    _bars(axes[2], times, "4,096 tokens, milliseconds")
    figure.suptitle(f"{data['header'].get('gpu', {}).get('name', '')}, {data['header'].get('date', '')}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _numbers(part: dict[str, Any], field: str) -> dict[str, float]:
    return {name: found[field] for name, found in part.get("results", {}).items() if field in found}


def _model_times(part: dict[str, Any]) -> dict[str, float]:
    times, recompute = _numbers(part, "milliseconds"), _numbers(part, "recompute_milliseconds")
    return times | ({"recompute": next(iter(recompute.values()))} if recompute else {})


def _bars(axis: Any, values: dict[str, float], title: str) -> None:
    axis.set_title(title)
    if not values:
        axis.text(0.5, 0.5, "no result", ha="center")
        axis.set_axis_off()
        return
    axis.barh(list(values), list(values.values()))
    axis.invert_yaxis()
