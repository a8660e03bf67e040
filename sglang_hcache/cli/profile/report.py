"""What ``hcache profile`` prints: the fitted costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from sglang_hcache.cli.plan.report import shape_text
from sglang_hcache.cli.profile.run import Measured
from sglang_hcache.cli.report import METHOD_NAMES, Report, new_table
from sglang_hcache.core.layout import Method
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.profile import Profile

_POOR_FIT = 0.9
"""R² below which a curve does not tell what was measured."""
_WORK_NAMES = {
    Method.HIDDEN: "project hidden states",
    Method.KV: "write K and V",
    Method.RECOMPUTE: "recompute the layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """All that is said about one measurement."""

    measured: Measured
    path: Path
    """Where the profile is."""
    has_dirs: bool
    """Whether there was a disk tier to measure."""
    is_found_by_servers: bool
    """Whether servers find ``path`` by themselves."""

    @property
    def profile(self) -> Profile:
        return self.measured.profile

    def data(self) -> dict[str, Any]:
        """For programs. Times in the units that the names say; curves as in the profile's file."""
        return {
            "file": str(self.path),
            "wall_s": self.measured.seconds,
            "profile": json.loads(self.profile.to_json()),
            "read_bytes_per_s": {
                tier: {
                    str(method): _bytes_per_s(curve, size)
                    for method, curve, size in _reads(self.profile, tier)
                }
                for tier in self.profile.tiers
            },
            "warnings": self.warnings(),
        }

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        Report(self.data(), self._parts()).show(as_json=as_json)

    def warnings(self) -> list[str]:
        """What makes the numbers worth less than they look."""
        found = list(self.measured.troubles)
        poor = [name for name, curve in _curves(self.profile) if (curve.r_squared or 0.0) < _POOR_FIT]
        if poor:
            found.append(
                f"R² below {_POOR_FIT:g} ({', '.join(poor)}): something else kept the machine busy, or --seconds was "
                "too short; run it again while nothing else runs"
            )
        return found

    def _parts(self) -> list[Text | Table]:
        profile = self.profile
        measured = profile.token_range
        lengths = f"{measured[0]:,} to {measured[1]:,} tokens" if measured else "lengths unknown"
        versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
        return [
            Text(shape_text(profile.model), "bold"),
            Text(f"Machine   {profile.machine}"),
            Text(f"Versions  {versions}"),
            Text(f"Measured  {lengths}, times of one layer; {self.measured.seconds:.0f} s in all"),
            Text(""),
            _read_table(profile),
            *self._no_disk(),
            Text(""),
            _compute_table(profile),
            *(Text(f"Warning: {warning}", "yellow") for warning in self.warnings()),
            Text(""),
            *(Text(line) for line in self._ending()),
        ]

    def _no_disk(self) -> list[Text]:
        if self.has_dirs or "disk" in self.profile.tiers:
            return []
        return [
            Text(
                "Only host memory was measured. Name the disk tier's directories with --hcache-dirs.",
                "yellow",
            )
        ]

    def _ending(self) -> list[str]:
        dirs = "disk directories" if self.has_dirs else "no disk tier"
        same = (
            f"the same model, dtype, machine, versions, attention backend, quantization, --tp-size and {dirs}"
        )
        lines = [f"Saved {self.path}"]
        if self.is_found_by_servers:
            lines.append(f"Servers started with {same} use it by themselves.")
        else:
            lines.append(f"Give it to servers with {same}: --hcache-profile {self.path}")
        return [
            *lines,
            f"What servers store by it, and from which length restoring pays: hcache plan --profile {self.path}",
        ]


def _read_table(profile: Profile) -> Table:
    numbers = ["GB/s", "fixed ms", "R²", "contention"]
    table = new_table(["reading from", "what", *numbers], set(numbers))
    for tier in profile.tiers:
        for method, curve, size in _reads(profile, tier):
            rate = _bytes_per_s(curve, size)
            table.add_row(
                tier,
                METHOD_NAMES[method],
                "-" if rate is None else _digits(rate / 1e9),
                _digits(1e3 * curve.fixed_s),
                _fit(curve),
                f"{profile.tiers[tier].contention:.2f}",
            )
    return table


def _compute_table(profile: Profile) -> Table:
    numbers = ["fixed µs", "µs a token", "ns a token²", "R²"]
    table = new_table(["computing", *numbers], set(numbers))
    for name, curve in _computations(profile):
        squared = _digits(1e9 * curve.per_token_squared_s) if curve.per_token_squared_s else "-"
        table.add_row(
            name, _digits(1e6 * curve.fixed_s), _digits(1e6 * curve.per_token_s), squared, _fit(curve)
        )
    return table


def _reads(profile: Profile, tier: str) -> list[tuple[Method, CostCurve, int]]:
    """(method, curve, bytes of a token) of what is read of one layer from ``tier``."""
    curves, shape = profile.tiers[tier], profile.model
    return [
        (Method.HIDDEN, curves.hidden, shape.hidden_row_bytes),
        (Method.KV, curves.kv, shape.kv_row_bytes),
    ]


def _computations(profile: Profile) -> list[tuple[str, CostCurve]]:
    compute = profile.compute
    curves = {Method.HIDDEN: compute.hidden, Method.KV: compute.kv, Method.RECOMPUTE: compute.recompute}
    return [(_WORK_NAMES[method], curve) for method, curve in curves.items()]


def _curves(profile: Profile) -> Iterator[tuple[str, CostCurve]]:
    for tier in profile.tiers:
        for method, curve, _ in _reads(profile, tier):
            yield f"{METHOD_NAMES[method]} from {tier}", curve
    yield from _computations(profile)


def _bytes_per_s(curve: CostCurve, row_bytes: int) -> float | None:
    """None: the fixed part explains all of the time."""
    return row_bytes / curve.per_token_s if curve.per_token_s else None


def _digits(value: float) -> str:
    """Three digits or more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _fit(curve: CostCurve) -> str:
    return "-" if curve.r_squared is None else f"{curve.r_squared:.3f}"
