"""``hcache metrics``: what the tier adds to a server's ``/metrics``."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sglang_hcache.cli.options import AsJson
from sglang_hcache.core.metrics import describe

_COLUMNS = ("metric", "kind", "unit", "label and its values", "meaning", "in `/server_info`")


def metrics(as_json: AsJson = False) -> None:
    """List the metrics that a server with the tier and `--enable-metrics` adds to SGLang's `/metrics`.

    All of them also carry the labels of SGLang's own metrics (`model_name`, `tp_rank` ...).
    """
    found = list(describe())
    if as_json:
        print(json.dumps([asdict(metric) for metric in found], indent=2))
    else:
        console = Console()
        for metric in found:
            console.print(Text(metric.name, "bold", no_wrap=True, overflow="ignore"), crop=False)
            kind = (
                f"{metric.kind}, {metric.unit}; {metric.labels}"
                if metric.labels
                else f"{metric.kind}, {metric.unit}"
            )
            events = f"\nin /server_info: {', '.join(metric.events)}" if metric.events else ""
            console.print(Padding(Text(f"{kind}\n{metric.help}{events}"), (0, 0, 1, 4)))


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.labels} | {metric.help} "
        f"| {', '.join(metric.events)} |"
        for metric in describe()
    ]
    return "\n".join(lines)
