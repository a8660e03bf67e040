"""What ``multiturn.py`` prints and writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from serving.report import (
    COLUMNS,
    TBT,
    draw_hits,
    draw_panels,
    draw_times,
    print_equality,
    print_table,
    save_figure,
    speedup_panels,
    write_results,
)


def show(data: dict[str, Any], console: Console) -> None:
    """For people."""
    workload, sizes = data["workload"], data["sizes"]
    left_out = f", {workload['left_out']} left out as too long" if workload["left_out"] else ""
    console.print(
        f"{workload['conversations']} conversations, {workload['requests']} requests ({workload['source']}"
        f"{left_out}), on average {workload['mean_input_tokens']:.1f} tokens of input and "
        f"{workload['mean_output_tokens']:.1f} of output, {workload['mean_context_tokens']:,.0f} at a conversation's "
        f"end; KV pool of {sizes['pool_tokens']:,} tokens",
        highlight=False,
    )
    print_table(console, "rate", "Multi-turn, by requests a second", data["rows"], (*COLUMNS, *TBT))
    if data["rates_left_out"]:
        console.print(f"No time was left for: {', '.join(f'{rate:g}' for rate in data['rates_left_out'])}")
    print_equality(console, data["rows"])


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and a picture."""
    write_results(folder / "multiturn", data, draw)


def draw(data: dict[str, Any], path: Path) -> None:
    """TTFT, its speed-up, TBT and hit ratios over the rate."""
    rows = data["rows"]
    ttft, tbt = partial(draw_times, what="ttft"), partial(draw_times, what="tbt", tail="p99")
    figure = draw_panels(rows, "rate", "requests a second", [ttft, *speedup_panels(rows), tbt, draw_hits])
    workload = data["workload"]
    save_figure(
        figure,
        path,
        f"{workload['conversations']} conversations, {workload['requests']} requests ({workload['source']}), "
        f"{workload['mean_context_tokens']:,.0f} tokens on average at their end",
        data,
    )
