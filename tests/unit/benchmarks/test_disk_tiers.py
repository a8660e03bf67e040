"""Disk tiers of ``restore_speed.py``: the throttle of ``disk:500MB``, on a clock of its own, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.store.io.engine import IOKind


class Clock:
    """Wakes up late, as a busy machine does."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (0.010 if seconds else 0.0)


def test_late_wake_ups_do_not_slow_a_limited_disk(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, clock = bench("restoring.limited_engine"), Clock()
    monkeypatch.setattr(module, "time", clock)
    started: list[tuple[int, float]] = []
    inner = SimpleNamespace(
        name="inner",
        submit=lambda _, indices: started.extend((index, clock.now) for index in indices),
        close=lambda _: True,
    )
    engine = module.LimitedEngine(inner, 1e6)
    batch = SimpleNamespace(ops=[SimpleNamespace(kind=IOKind.READ, size=5_000)] * 10)
    engine.submit(batch, range(10))
    assert engine.close(10.0)
    assert [index for index, _ in started] == list(range(10))
    for index, at in started:  # 5 ms each, whatever sleeping added to the ones before
        assert 0.005 * (index + 1) <= at - 100.0 + 1e-9 <= 0.005 * (index + 1) + 0.010 + 2e-9


def test_a_limited_disk_that_was_idle_has_nothing_to_make_up_for(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, clock = bench("restoring.limited_engine"), Clock()
    monkeypatch.setattr(module, "time", clock)
    started: list[float] = []
    inner = SimpleNamespace(name="x", submit=lambda *_: started.append(clock.now), close=lambda _: True)
    engine = module.LimitedEngine(inner, 1e6)
    batch = SimpleNamespace(ops=[SimpleNamespace(kind=IOKind.READ, size=5_000)])
    engine.submit(batch, [0])
    deadline = time.monotonic() + 10
    while not started and time.monotonic() < deadline:
        time.sleep(0.001)
    clock.now += 60.0
    asked = clock.now
    engine.submit(batch, [0])
    assert engine.close(10.0)
    assert started[1] >= asked + 0.005


def test_memory_is_not_measured_as_a_disk(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = bench("restoring.counted_disk")
    monkeypatch.setattr(module, "takes_direct_writes", lambda _: False)
    assert module.disk_facts(tmp_path, ("host", "disk:500MB"))["direct"] is False
    with pytest.raises(ConfigError, match=r"--dir: .* has no O_DIRECT"):
        module.disk_facts(tmp_path, ("host", "disk"))
    monkeypatch.setattr(module, "takes_direct_writes", lambda _: True)
    found = module.disk_facts(tmp_path, ("disk",))
    assert found["direct"] is True
    assert found["file_system"]


def test_a_run_with_defaults_shows_the_speed_over_the_bandwidth(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiers = bench("restoring.settings").parse_tiers("--tiers", bench("restore_speed").TIERS)
    rows = [
        {"tier": tier, "length": length, "variant": "kv", "tokens_per_s": 1.0}
        for tier in tiers
        for length in (256, 1024)
    ]
    titles: list[str] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, *_, **__: titles.extend(axis.get_title() for axis in figure.axes),
    )
    bench("restoring.figures").draw(tmp_path / "x.png", rows, "")
    assert titles == [*tiers, "1,024 tokens, disk throttled"]
