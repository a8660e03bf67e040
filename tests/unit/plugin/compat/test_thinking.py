"""``--strip-thinking-cache``: SGLang keeps only the prompt of a request that thinks, and so do the tiers."""

from __future__ import annotations

import pytest

from tests.unit.plugin.compat.test_decoded_rows import Scheduler, prompt


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("drops", "thoughts", "expected"),
    [(True, 1, [True, True]), (True, 0, [True] * 4), (False, 1, [True] * 4)],
)
def test_thoughts_are_not_saved(overlaps: bool, drops: bool, thoughts: int, expected: list[bool]) -> None:
    scheduler = Scheduler(overlaps=overlaps)
    scheduler.bridge.saving.drops_thoughts = drops
    req = scheduler.request("one", prompt(1, 128))
    req.reasoning_tokens = thoughts
    scheduler.prefill(req)
    scheduler.decode(req, passes=130)
    scheduler.finish(req)
    assert [found for found in scheduler.stored(req) if found is not None] == expected
