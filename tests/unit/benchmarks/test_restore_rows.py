"""What ``restore_speed.py`` says of ``auto`` where its gate declined to restore."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sglang_hcache.core.layout import Method
from sglang_hcache.sglang_plugin.serving.restore_maker import Verdict

Import = Callable[[str], Any]
LAYERS, LENGTH = 4, 128
DECISION = SimpleNamespace(restore_s=9.0, recompute_s=2.0, num_recompute=1)


class Restoring:
    """A variant that restores, one way or another."""

    stored = (Method.HIDDEN,) * LAYERS

    def __init__(self, decision: Any) -> None:
        self._decision = decision

    def restore(self, length: int, *, check: bool = False) -> tuple[float, Any, bool]:
        return 3.0, self._decision, True

    def read_alone(self, length: int) -> float:
        return 1.0


def measured(bench: Import, *, declines: Callable[[], bool], rounds: int = 2) -> dict[str, dict[str, Any]]:
    """Rows by variant; before each restore of ``auto`` it is asked whether the gate ``declines`` it."""
    speed, rig_module = bench("restoring.speed"), bench("restoring.rig")
    rig = SimpleNamespace(
        num_layers=LAYERS,
        recompute=lambda length: 2.5,
        question=lambda length: 0.1,
        bare_products=lambda layers, lengths: 0.5,
    )

    class Auto(rig_module.Variant):
        """The real one, as far as it does not restore."""

        def __init__(self) -> None:
            self.rig, self.keys, self.stored = rig, [], Restoring.stored
            self.maker = SimpleNamespace(decide=lambda *_: Verdict(DECISION, False, 0.0, 0))
            self._may_decline = True

        def restore(self, length: int, *, check: bool = False) -> tuple[float, Any, bool]:
            if not declines():
                return 3.0, DECISION, True
            return super().restore(length, check=check)

        def read_alone(self, length: int) -> float:
            return 1.0

    plain = SimpleNamespace(restore_s=4.0, recompute_s=2.0, num_recompute=0)
    settings = SimpleNamespace(rounds=rounds)
    variants = {"kv": Restoring(plain), "auto": Auto()}
    rows = speed._measure_length(settings, rig, "host", LENGTH, variants, lambda: None)
    return {row.variant: row.as_json() for row in rows}


def shown(bench: Import, rows: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Words of each variant's line in the table."""
    console = Console(width=200, file=(out := io.StringIO()))
    bench("restoring.report").show({"model": {"layers": LAYERS}, "rows": [*rows.values()]}, console)
    return {words[0]: words[1:] for line in out.getvalue().splitlines() if (words := line.split())}


def test_where_it_declined_the_row_says_so(bench: Import) -> None:
    rows = measured(bench, declines=lambda: True)
    auto, kv = rows["auto"], rows["kv"]
    assert (auto["seconds"], auto["predicted_s"], auto["num_recompute"]) == (2.5, 2.0, LAYERS)
    assert (auto["x_kv"], auto["x_recompute"]) == (3.0 / 2.5, 1.0)
    assert [auto[name] for name in ("io_s", "compute_s", "over_floor", "efficiency")] == [None] * 4
    assert (kv["predicted_s"], kv["num_recompute"], kv["io_s"], kv["over_floor"]) == (4.0, 0, 1.0, 3.0)
    table = shown(bench, rows)
    assert {name: "all" in table[name] for name in rows} == {
        "recompute": True,
        "kv": False,
        "auto": True,
        "ideal": False,
    }


@pytest.mark.parametrize("tried", range(2, 6))
def test_one_that_is_tried_says_nothing_of_the_others(bench: Import, tried: int) -> None:
    """Behind the first, which warms up."""
    numbers = itertools.count(1)
    auto = measured(bench, declines=lambda: next(numbers) != tried, rounds=4)["auto"]
    assert (auto["predicted_s"], auto["num_recompute"], auto["io_s"]) == (2.0, LAYERS, None)


def test_where_it_restores_it_is_predicted_to(bench: Import) -> None:
    rows = measured(bench, declines=lambda: False)
    assert (rows["auto"]["predicted_s"], rows["auto"]["num_recompute"]) == (9.0, 1)
    assert "all" not in shown(bench, rows)["auto"]
