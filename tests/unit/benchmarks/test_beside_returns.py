"""What ``overhead.py`` says of others' decoding while a history returns: nothing where it did not return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sglang_hcache.core.errors import ConfigError

Import = Callable[[str], Any]

LENGTH = 9_984
GAPS = {"off": {"alone": [0.01], "beside": [0.02]}, "tier": {"alone": [0.01], "beside": [0.03]}}


def test_a_ratio_is_of_whole_returns(bench: Import) -> None:
    rows = bench("serving.overhead_requests").company_rows(LENGTH, GAPS, [LENGTH, LENGTH])
    for row in rows:
        assert (row["off"], row["tier"]) == (pytest.approx(2), pytest.approx(3))
        assert row["restored_tokens"] == LENGTH
        assert "not_measured" not in row


def test_one_return_that_lacks_a_part_makes_it_none(bench: Import, tmp_path: Path) -> None:
    rows = bench("serving.overhead_requests").company_rows(LENGTH, GAPS, [LENGTH, LENGTH - 64])
    for row in rows:
        assert (row["off"], row["tier"]) == (pytest.approx(2), None)
        assert row["not_measured"] == "9,920 of 9,984 tokens were restored"
    report, console = bench("serving.overhead_report"), Console(record=True, width=200)
    report.show({"rows": rows}, console)
    text = console.export_text()
    assert "over TBT alone: not measured: 9,920 of 9,984 tokens were restored" in text
    assert "3.00 x" not in text
    report.write(tmp_path, {"rows": rows})
    assert "9,920 of 9,984" in (tmp_path / "overhead.csv").read_text()


def test_nothing_came_beside_a_fast_return(bench: Import) -> None:
    gaps = {"off": GAPS["off"], "tier": {"alone": [0.01], "beside": []}}
    for row in bench("serving.overhead_requests").company_rows(LENGTH, gaps, [LENGTH]):
        assert row["tier"] is None
        assert row["not_measured"] == "nobody decoded meanwhile"


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (1.5, 3.5, [1, 1, 0.5]),  # tokens at 1, 2, 3, 4, 14 and 15
        (4.5, 9, [5]),  # nobody decodes: all of it is one gap
        (3.9, 14.5, [1, 10, 0.5]),
        (20, 30, []),
    ],
)
def test_what_stands_still_is_a_gap(bench: Import, begin: float, end: float, expected: list[float]) -> None:
    gaps_within = bench("serving.overhead_requests").gaps_within
    assert gaps_within(1, [1, 1, 1, 10, 1], begin, end) == expected


def test_answers_that_came_all_at_once_have_no_ratio(bench: Import, tmp_path: Path) -> None:
    paired_row = bench("serving.overhead_requests").paired_row
    row = paired_row("TBT", {"off": [0.0, 0.01, 0.02], "tier": [0.01, 0.0, 0.03]})
    assert (row["off"], row["tier"], row["ratio"]) == (0.02, 0.03, pytest.approx(1.5))
    row = paired_row("TBT", {"off": [0.0, 0.01], "tier": [0.01, 0.0]})
    assert "ratio" not in row
    report, console = bench("serving.overhead_report"), Console(record=True, width=200)
    report.show({"rows": [row]}, console)
    assert "TBT: not measured: tokens came all at once" in console.export_text()
    report.write(tmp_path, {"rows": [row]})


class Client:
    """A server that restores as much of a prompt as was saved in passes that staging had room for."""

    def __init__(self, answer: Callable[..., Any], most: int) -> None:
        self._answer = answer
        self._most = most
        self._on_device: list[int] = []
        self._staged = 0
        self.saved: list[int] = []

    async def ask(self, prompt: list[int], *, max_tokens: int, is_compared: bool = True) -> Any:
        restored = 0
        if len(prompt) > 1000:
            if not self._on_device:
                restored = len(self.saved) // 64 * 64 if prompt[: len(self.saved)] == self.saved else 0
            known = max(len(self._on_device), restored)
            new = prompt[known:]
            if self._staged + len(new) <= self._most and known <= len(self.saved):
                self.saved = list(prompt)
            self._staged += len(new)
            self._on_device = list(prompt)
        await asyncio.sleep(0)
        return self._answer(restored, max_tokens)

    async def settle(self) -> None:
        self._staged = 0

    async def empty(self, *, tiers: bool) -> None:
        assert not tiers
        self._on_device, self._staged = [], 0


def answer_of(bench: Import) -> Callable[[int, int], Any]:
    token_answer = bench("serving.token_client").TokenAnswer

    def answer(restored: int, tokens: int) -> Any:
        return token_answer(
            tokens=(1,) * tokens,
            logprobs=(0.0,) * tokens,
            likely=({2: -9.0},) * tokens,
            sources=SimpleNamespace(restored=restored, host=restored, disk=0, device=0),
            ttft_s=0.001,
            gaps_s=(0.001,) * (tokens - 1),
            total_s=0.001 * tokens,
        )

    return answer


def asking(bench: Import, settings: Any, pair: dict[str, Any]) -> Any:
    model = SimpleNamespace(random_prompt=lambda generator, n: list(generator.integers(0, 1000, n)))
    return bench("serving.overhead_requests").PairedRequests(settings, model, pair, "float32")


@pytest.mark.parametrize(("most", "is_measured"), [(5000, True), (3000, False)])
def test_a_history_is_saved_in_pieces_that_staging_holds(bench: Import, most: int, is_measured: bool) -> None:
    settings = SimpleNamespace(
        long_history=LENGTH + 16, rounds=2, decoded=8, warm_up=0, seed=0, histories=(LENGTH,), batches=(1,)
    )
    pair = {name: Client(answer_of(bench), most) for name in ("off", "tier")}
    asked = asking(bench, settings, pair)
    rows = asyncio.run(asked._company())
    for row in rows:
        assert (row["restored_tokens"] == LENGTH) is is_measured
        assert ("were restored" not in row.get("not_measured", "")) is is_measured
    (row,) = asyncio.run(asked._returning(LENGTH))
    assert (row["restored_tokens"] == LENGTH) is is_measured


def test_what_was_restored_is_that_of_the_rounds_that_count(bench: Import) -> None:
    """``auto`` may decide otherwise in each."""
    answer, returns = answer_of(bench), [0, 0, LENGTH]

    class Deciding(Client):
        async def ask(self, prompt: list[int], *, max_tokens: int, is_compared: bool = True) -> Any:
            await asyncio.sleep(0)
            return answer(returns.pop(0) if len(prompt) > LENGTH else 0, max_tokens)

    pair = {"off": Client(answer, 5000), "tier": Deciding(answer, 5000)}
    asked = asking(bench, SimpleNamespace(rounds=1, warm_up=2, seed=0), pair)
    (row,) = asyncio.run(asked._returning(LENGTH))
    assert row["restored_tokens"] == row["host_tokens"] == LENGTH
    assert (row["disk_tokens"], row["compared"], row["unequal"]) == (0, 1, 0)


def test_answers_after_a_return_are_compared(bench: Import) -> None:
    """Other new tokens for each server would have other answers."""
    answer = answer_of(bench)

    class Echoing(Client):
        def __init__(self, by: int) -> None:
            super().__init__(answer, 5000)
            self._by = by

        async def ask(self, prompt: list[int], *, max_tokens: int, is_compared: bool = True) -> Any:
            await asyncio.sleep(0)
            return replace(answer(0, max_tokens), tokens=(prompt[-1] + self._by,) * max_tokens)

    settings = SimpleNamespace(rounds=3, warm_up=1, seed=0)
    for by, unequal in ((0, 0), (1, 3)):
        pair = {"off": Echoing(0), "tier": Echoing(by)}
        (row,) = asyncio.run(asking(bench, settings, pair)._returning(LENGTH))
        assert (row["compared"], row["differ"], row["unequal"]) == (3, unequal, unequal)
    rounded = bench("serving.overhead_requests").compared([answer(0, 2)], [answer(0, 2)], "bfloat16")
    assert (rounded["differ"], rounded["unequal"]) == (0, None)


def test_only_what_is_named_is_measured(bench: Import) -> None:
    wanted = bench("overhead")._wanted
    names = ["start", "prefill", "64 tokens return", "decoding while others return", "memory"]
    assert wanted([], names) == names
    assert wanted(["return"], names) == names[2:4]
    assert wanted(["memory", "64"], names) == [names[2], names[4]]
    with pytest.raises(ConfigError, match="--only: nothing has x or zz in its name; there are: start; "):
        wanted(["x", "zz"], names)
