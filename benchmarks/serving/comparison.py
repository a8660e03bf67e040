"""What a comparison of methods measured: answers by method, reduced to rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.gathered import Gathered
from common.precision import precision
from common.statistics import median_with_interval
from serving.latency import Latency
from serving.token_client import TokenAnswer, compare

BASELINES = ("recompute", "kv")
"""Speed-ups are given over these, where they are among the methods."""
SOURCES = ("device", "host", "disk")


@dataclass
class Measured:
    """One method in one round of a load."""

    answers: list[TokenAnswer] = field(default_factory=list)
    busy_s: float = 0.0
    """Time in which the method served these requests."""

    @property
    def ttft_mean_s(self) -> float:
        return statistics.fmean(answer.ttft_s for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        restored = sum(answer.sources.restored > 0 for answer in self.answers)
        return {"ttft_mean_s": self.ttft_mean_s, "busy_s": self.busy_s, "restored_requests": restored}


def row_of(rounds: Sequence[Measured], reference: Sequence[Measured]) -> dict[str, Any]:
    """Numbers of one method, of the requests of all rounds.

    Args:
        reference: the same rounds of the method that its answers must equal, in the same order.
    """
    answers = _answers(rounds)
    busy_s = sum(measured.busy_s for measured in rounds)
    prompt = sum(answer.sources.prompt for answer in answers)
    found = {name: sum(getattr(answer.sources, name) for answer in answers) for name in SOURCES}
    allowed = precision().logprob_tolerance
    compared = [
        compare(answer, other, allowed) for answer, other in zip(answers, _answers(reference), strict=True)
    ]
    finite = [item.logprob for item in compared if item.logprob < float("inf")]
    made = sum(len(answer.tokens) for answer in answers)
    return {
        "requests": len(answers),
        "prompt_tokens": prompt,
        "answer_tokens": made,
        **{f"{name}_hit_ratio": found[name] / prompt if prompt else 0.0 for name in SOURCES},
        "restored_tokens": found["host"] + found["disk"],
        "restored_requests": sum(answer.sources.restored > 0 for answer in answers),
        "recomputed_tokens": sum(answer.sources.recomputed for answer in answers),
        **Latency.of([answer.ttft_s for answer in answers]).fields("ttft"),
        **Latency.of([gap for answer in answers for gap in answer.gaps_s]).fields("tbt"),
        "requests_per_s": len(answers) / busy_s if busy_s else None,
        "tokens_per_s": (prompt + made) / busy_s if busy_s else None,
        "compared": 0 if rounds is reference else len(compared),
        "unequal": sum(not item.is_equal for item in compared),
        "ties": sum(item.is_tie for item in compared),
        "largest_logprob_difference": max(finite, default=None),
        "rounds": [measured.as_json() for measured in rounds],
    }


def _answers(rounds: Sequence[Measured]) -> list[TokenAnswer]:
    return [answer for measured in rounds for answer in measured.answers]


@dataclass(frozen=True)
class Comparison:
    """Methods under one load after another. A load's rows are there as soon as a method's first round is measured.

    Args:
        key: what tells loads apart, such as ``alpha``.
        notes: method -> why it cannot be measured.
        rounds: of each load.
    """

    found: Gathered
    key: str
    values: Sequence[float]
    """Of ``key``, one for each load."""
    methods: Sequence[str]
    notes: Mapping[str, str]
    rounds: int = 1

    def begin(self) -> None:
        """All loads are expected; those that there is no method for are over."""
        self.found.expect(map(self._name, self.values))
        if not set(self.methods) - self.notes.keys():
            for value in self.values:
                self.found.add(self._name(value), rows_of({self.key: value}, self.methods, {}, self.notes))

    def add(self, value: float, rounds: Sequence[Mapping[str, Measured]]) -> None:
        """What is measured so far under one load: rounds, by method. Of a later round all methods count, or none."""
        there = [method for method in self.methods if method in rounds[0]]
        whole = [each for each in rounds if all(method in each for method in there)]
        measured = {method: [each[method] for each in whole] for method in there}
        rows = rows_of({self.key: value}, self.methods, measured, self.notes)
        lacks = [method for method in self.methods if method not in (*there, *self.notes)]
        if not lacks and (left := self.rounds - len(whole)):
            lacks = [f"{left} rounds"]
        self.found.add(self._name(value), rows, lacks=lacks)

    def tell_round(self, number: int) -> str:
        """Which one it is, behind what a progress bar says of a load; nothing where there is one. From 1 on."""
        return f", round {number} of {self.rounds}" if self.rounds > 1 else ""

    def leave_out(self, value: float) -> None:
        """This load is not measured, and not missing."""
        self.found.leave_out(self._name(value))

    def _name(self, value: float) -> str:
        return f"{self.key} {value:.12g}"


def reference_of(methods: Iterable[str]) -> str:
    """Whose answers those of the others must equal: the baseline's, or the first one's."""
    found = list(methods)
    return "recompute" if "recompute" in found else found[0]


def rows_of(
    key: Mapping[str, Any],
    methods: Sequence[str],
    measured: Mapping[str, Sequence[Measured]],
    notes: Mapping[str, str],
) -> list[dict[str, Any]]:
    """One row for each of ``methods`` that is measured, or has a note.

    Args:
        key: first fields of the rows, such as ``{"alpha": 1.0}``.
        measured: method -> its rounds, as many of each; the requests of a round are the same for all.
        notes: method -> why it was not measured.
    """
    if not measured:
        return [{**key, "method": method, "requests": 0, "note": note} for method, note in notes.items()]
    reference = measured[reference_of(measured)]
    rows = {method: row_of(rounds, reference) for method, rounds in measured.items()}
    for method, row in rows.items():
        row |= _speedups_of_rounds(measured[method], measured)
    blank = dict.fromkeys(next(iter(rows.values()))) | {"requests": 0}
    return [
        {**key, "method": method, **rows.get(method, blank), "note": notes.get(method, "")}
        for method in methods
        if method in rows or method in notes
    ]


def _speedups_of_rounds(
    own: Sequence[Measured], measured: Mapping[str, Sequence[Measured]]
) -> dict[str, float | None]:
    """``round_speedup_over_*``: the median of the rounds' ratios of mean TTFT, with its 95 % interval."""
    fields: dict[str, float | None] = {}
    for baseline in BASELINES:
        ratios = [
            other.ttft_mean_s / this.ttft_mean_s
            for other, this in zip(measured.get(baseline, ()), own, strict=False)
        ]
        values = median_with_interval(ratios) if ratios else (None, None, None)
        names = [f"round_speedup_over_{baseline}{end}" for end in ("", "_low", "_high")]
        fields |= dict(zip(names, values, strict=True))
    return fields
