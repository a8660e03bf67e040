"""What adds up what happens."""

from __future__ import annotations

from sglang_hcache.core.observer import Counters


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def count(self, event: str, amount: int = 1) -> None:
        self.told.append((event, amount))

    def observe(self, measure: str, value: float) -> None:
        self.told.append((measure, value))


def test_counts_and_measures_are_kept_and_passed_on() -> None:
    listener = Listener()
    for counters in (Counters(), Counters(listener)):
        counters.count("b")
        counters.count("a", 2)
        counters.count("b")
        counters.observe("seconds", 0.5)
        counters.observe("seconds", 1.0)
        assert counters.snapshot() == {"a": 2, "b": 2}
        assert counters.measures() == {"seconds": {"count": 2, "sum": 1.5}}
    assert listener.told == [("b", 1), ("a", 2), ("b", 1), ("seconds", 0.5), ("seconds", 1.0)]
