"""What ``zipf_replay.py`` prints and writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from serving.report import (
    COLUMNS,
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
    console.print(
        f"{_documents(workload)}: {', '.join(workload['tasks'])}; questions of "
        f"{workload['mean_question_tokens']:.0f}, answers of {workload['mean_answer_tokens']:.0f} tokens; KV pool of "
        f"{sizes['pool_tokens']:,} tokens",
        highlight=False,
    )
    print_table(console, "alpha", "Zipf replay", data["rows"], COLUMNS)
    print_equality(console, data["rows"])


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and a picture."""
    write_results(folder / "zipf_replay", data, draw)


def draw(data: dict[str, Any], path: Path) -> None:
    """TTFT, speed-ups and hit ratios over the skew."""
    rows = data["rows"]
    panels = [partial(draw_times, what="ttft"), *speedup_panels(rows), draw_hits]
    figure = draw_panels(rows, "alpha", "Zipf skew (alpha)", panels)
    save_figure(figure, path, _documents(data["workload"]), data)


def _documents(workload: dict[str, Any]) -> str:
    cut = f", {workload['cut_documents']} of them cut" if workload["cut_documents"] else ""
    number, length = workload["documents"], workload["mean_context_tokens"]
    return f"{number} documents of {length:,.0f} tokens ({workload['source']}{cut})"
