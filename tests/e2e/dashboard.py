"""A real Prometheus beside a server, and the dashboard's queries asked of it, and drawn.

Grafana is in no package index that tests may rely on: :func:`draw` shows what its panels would, laid out as they are.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from sglang_hcache.cli.server.ports import free_port
from sglang_hcache.core.units import format_bytes
from tests.e2e.harness import wait_for

CONFIGS = Path(__file__).parents[2] / "configs"
_VARIABLES = {"$model_name": ".*", "$instance": ".*", "$__rate_interval": "10m"}
_RANGE_S = 180
_COLUMN, _ROW = 0.75, 0.42  # inches of a cell of Grafana's grid


@dataclass(frozen=True)
class Series:
    """A line of a panel: times and values, both seconds and what the panel's unit says."""

    name: str
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    title: str
    kind: str
    unit: str
    position: dict[str, int]
    is_stacked: bool
    queries: tuple[tuple[str, str], ...]
    """Query and legend, both with Prometheus' names for what Grafana fills in."""


def panels() -> list[Panel]:
    """The panels of ``configs/grafana/hcache.json``, with its headlines, which have no queries."""
    found = json.loads((CONFIGS / "grafana" / "hcache.json").read_text())["panels"]
    return [
        Panel(
            panel["title"],
            panel["type"],
            panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
            panel["gridPos"],
            '"mode": "normal"' in json.dumps(panel),
            tuple((_filled_in(each["expr"]), each["legendFormat"]) for each in panel.get("targets", ())),
        )
        for panel in found
    ]


def _filled_in(query: str) -> str:
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


class Prometheus:
    """Debian's Prometheus with the repository's configuration, scraping one server every second."""

    def __init__(self, folder: Path, server_url: str) -> None:
        config = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "1s"
        config["rule_files"] = [str(CONFIGS / "prometheus" / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server_url.removeprefix("http://")]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self._url, timeout=30, trust_env=False)

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_scraping, "Prometheus to scrape the server", 60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)
        self._client.close()

    def _is_scraping(self) -> bool:
        try:
            return bool(self._ask("query", query="up == 1")["result"])
        except httpx.HTTPError:
            return False

    def _ask(self, what: str, **parameters: str | float) -> Any:
        response = self._client.get(f"/api/v1/{what}", params=parameters)
        response.raise_for_status()
        return response.json()["data"]

    def rules(self) -> list[dict[str, Any]]:
        """The alerts that it evaluates."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def series(self, query: str, legend: str) -> Iterator[Series]:
        """What a panel draws for the last minutes; values that are no numbers are left out."""
        now = time.time()
        found = self._ask("query_range", query=query, start=now - _RANGE_S, end=now, step=1)
        for line in found["result"]:
            name = legend
            for label, value in line["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = [(float(at), float(value)) for at, value in line["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                times, values = zip(*points, strict=True)
                yield Series(name, times, values)


def draw(prometheus: Prometheus, path: Path) -> None:
    """The dashboard's panels as a picture, at the places and in the sizes that they have in Grafana."""
    from matplotlib.figure import Figure

    shown = panels()
    height = max(panel.position["y"] + panel.position["h"] for panel in shown)
    figure = Figure(figsize=(24 * _COLUMN, height * _ROW), facecolor="#eef0f2")
    for panel in shown:
        at = panel.position
        card = figure.add_axes(
            (
                (at["x"] + 0.15) / 24,
                1 - (at["y"] + at["h"] - 0.2) / height,
                (at["w"] - 0.3) / 24,
                (at["h"] - 0.4) / height,
            )
        )
        card.set(xticks=[], yticks=[])
        card.spines[:].set_visible(False)
        if panel.kind == "row":
            card.set_facecolor("none")
            card.text(0, 0.5, panel.title, fontsize=15, weight="bold", va="center")
            continue
        title = 1 - 0.45 / at["h"]
        card.text(0.02, title, panel.title, fontsize=11, weight="bold", va="center")
        lines = [series for query, legend in panel.queries for series in prometheus.series(query, legend)]
        if panel.kind == "stat":
            text = _text(lines[0].values[-1], panel.unit) if lines else "no data"
            card.text(0.5, 0.42, text, ha="center", va="center", fontsize=26, color="#0b7285")
        else:
            _draw_lines(card.inset_axes((0.11, 0.27, 0.87, title - 0.36)), panel, lines)
    figure.savefig(path, dpi=60)


def _draw_lines(axes: Any, panel: Panel, lines: list[Series]) -> None:
    """What is 0 all the time is left out, for the picture's sake."""
    end = max((series.times[-1] for series in lines), default=0.0)
    moved = [series for series in lines if any(series.values)]
    bottom: dict[float, float] = {}
    for series in moved:
        times = [at - end for at in series.times]
        if panel.is_stacked:
            below = [bottom.get(at, 0.0) for at in series.times]
            top = [low + value for low, value in zip(below, series.values, strict=True)]
            bottom.update(zip(series.times, top, strict=True))
            axes.fill_between(times, below, top, label=series.name, alpha=0.6, linewidth=0)
        else:
            axes.plot(times, series.values, label=series.name, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _at: f"{value:.0f} s")
    axes.yaxis.set_major_formatter(lambda value, _at: _text(value, panel.unit))
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if moved:
        columns = 3 if max(len(series.name) for series in moved) < 22 else 2
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.06, -0.14),
            ncols=columns,
            fontsize=8,
            frameon=False,
            borderaxespad=0,
        )


def _text(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if unit in ("bytes", "Bps"):
        return format_bytes(int(value)) + ("/s" if unit == "Bps" else "")
    return f"{value:.3g}"
