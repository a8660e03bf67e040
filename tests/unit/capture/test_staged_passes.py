"""Passes of a GPU right behind each other, in the order in which SGLang's overlap scheduling begins and ends them."""

from __future__ import annotations

import threading
import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.capture.events import RequestBegins, RequestRows
from sglang_hcache.capture.sources import RowSource
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.sglang_plugin.seam.budget import staged_passes_of
from tests.unit.capture.save_parts import SaveParts

_TIMEOUT_S = 30.0
ROWS = 128
LAYOUT = StateLayout.of((Method.HIDDEN,) * 2, hidden_row_bytes=16, kv_row_bytes=32)
NAMESPACE = Namespace(model=b"m", layout="test")


class Device:
    """Its rows are in staging when :attr:`ends` of the pass says so."""

    def __init__(self) -> None:
        self.ends: list[threading.Event] = []

    def values(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.clone()

    def take(self, source: RowSource, into: torch.Tensor) -> None:
        source(into, slice(0, len(into)), slice(0, into.shape[1]))

    def taken(self) -> Any:
        self.ends.append(threading.Event())
        return SimpleNamespace(wait=self.ends[-1].wait)


def saved_of_a_long_prompt(staged_passes: int, passes: int, *, before: int = 0) -> list[bool]:
    """Which passes of a prompt were saved.

    Args:
        before: rows that are staged when the prompt comes.
    """
    parts, device = SaveParts(LAYOUT, slots=64, rows=staged_passes * ROWS, pass_rows=ROWS), Device()
    capture = parts.capture(device=device)  # type: ignore[arg-type]
    earlier = parts.ring.reserve(before) if before else None
    parts.assembler.publish(RequestBegins("a", NAMESPACE, array("q")))
    tokens = list(range(passes * ROWS))
    rows = torch.arange(4.0 * len(tokens)).view(-1, 4)

    def wait_until_assembled(number: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while parts.assembler._published - parts.assembler._handled > len(device.ends) - 1 - number:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    for number in range(passes):
        if number >= 3:  # what ended a whole pass ago has been copied meanwhile
            wait_until_assembled(number - 3)
        part = slice(number * ROWS, (number + 1) * ROWS)
        capture.begin(torch.tensor(tokens[part]), torch.tensor(tokens[part]))
        for layer in range(2):
            capture.on_layer(layer, rows[part])
        capture.end([RequestRows("a", part.start, 0, ROWS)], is_replayed=False)
        if earlier is not None:
            parts.ring.release(earlier)
            earlier = None
        if number >= 2:  # the last but one has just ended: that is why this one was begun
            device.ends[number - 2].set()
    for end in device.ends:
        end.set()
    parts.assembler.close()
    wrong = list(parts.chunks(NAMESPACE, tokens, lambda _layer, first, end: rows[first:end]))
    assert not any(wrong)
    found = [each is not None for each in wrong]
    return [all(found[first : first + 2]) for first in range(0, len(found), 2)]


def test_the_default_holds_passes_that_follow_each_other() -> None:
    gpu = SimpleNamespace(device="cuda", disable_overlap_schedule=False)
    assert saved_of_a_long_prompt(staged_passes_of(gpu), 8) == [True] * 8


@pytest.mark.parametrize("others", [5, 80, 127])
def test_rows_of_other_requests_before_them_do_not_cost_a_pass(others: int) -> None:
    """Of those that decode, or a prompt that is shorter than a pass: the ring holds three passes, wherever they lie."""
    assert saved_of_a_long_prompt(3, 8, before=others) == [True] * 8


@pytest.mark.parametrize("fewer", [1, 2])
def test_with_less_staging_passes_of_a_long_prompt_are_lost(fewer: int) -> None:
    assert not all(saved_of_a_long_prompt(fewer, 8))
