"""What ``restore_speed.py`` prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from common.header import make_header
from common.results import write_csv, write_json
from restoring.figures import draw

if TYPE_CHECKING:
    from sglang_hcache.cli.tiny_model.model import TinyModel

RATIOS = tuple(
    f"{name}{end}" for name in ("x_kv", "x_recompute", "over_floor") for end in ("", "_low", "_high")
)
"""Medians of the rounds' ratios, and the ends of their 95 % intervals."""


def header_of(name: str, model: TinyModel, rounds: int) -> dict[str, Any]:
    """What results begin with."""
    return {
        **make_header(name),
        "model": {
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.num_kv_heads,
            "dtype": model.dtype,
        },
        "rounds": rounds,
    }


def show(data: dict[str, Any], console: Console) -> None:
    """One table a tier and length."""
    rows = data["rows"]
    for tier in dict.fromkeys(row["tier"] for row in rows):
        for length in dict.fromkeys(row["length"] for row in rows):
            of_length = {
                row["variant"]: row for row in rows if (row["tier"], row["length"]) == (tier, length)
            }
            if not of_length:
                continue
            table = Table(
                title=f"{length:,} tokens from {tier} (I/O, compute: what these need alone)",
                title_justify="left",
                box=None,
                pad_edge=False,
            )
            for name in ("", "ms", "tokens/s", "x kv", "x recompute", "predicted", "I/O", "compute",
                         "over floor (95 %)", "recomputed", "stores"):  # fmt: skip
                table.add_column(name, justify="left" if name in ("", "stores") else "right")
            for row in of_length.values():
                table.add_row(
                    row["variant"], f"{1e3 * row['seconds']:.1f}", f"{row['tokens_per_s']:,.0f}",
                    f"{row['x_kv']:.2f}", f"{row['x_recompute']:.2f}",
                    *(_ms(value) for value in (row["predicted_s"], row["io_s"], row["compute_s"])),
                    _over_floor(row), _recomputed(row, data["model"]["layers"]), row["stored"],
                )  # fmt: skip
            console.print(table)
            console.print()


def write(folder: Path, data: dict[str, Any]) -> None:
    """JSON, CSV and a picture."""
    write_json(folder / "restore_speed.json", data)
    rows = data["rows"]
    write_csv(folder / "restore_speed.csv", rows)
    model = data["model"]
    heads = f"{model['heads']} heads, {model['kv_heads']} KV heads"
    draw(folder / "restore_speed.png", rows, f"{model['layers']} layers, {model['hidden']} wide, {heads}")


def _over_floor(row: dict[str, Any]) -> str:
    if row["over_floor"] is None:
        return ""
    return f"{row['over_floor']:.2f} ({row['over_floor_low']:.2f}-{row['over_floor_high']:.2f})"


def _recomputed(row: dict[str, Any], layers: int) -> str:
    if row["variant"] == "ideal":
        return ""
    return "all" if row["num_recompute"] == layers else str(row["num_recompute"])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.1f}"
