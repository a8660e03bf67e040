"""What restores that run bring of another prompt."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.serving.running import Running
from sglang_hcache.testing.stored_chunks import make_keys

KEYS = make_keys(0, 10)


@pytest.mark.parametrize(
    ("restored", "leading"),
    [((0, 10), 10), ((0, 4), 4), ((0, 1), 1), ((5, 9), 0), ((0, 0), 0)],
)
def test_only_what_a_prompt_begins_with_counts(restored: tuple[int, int], leading: int) -> None:
    """One without the beginning is what another request asked for before the tree was flushed."""
    running = Running(Alone())
    job = SimpleNamespace(keys=KEYS[slice(*restored)], num_tokens=0)
    running.add(Mock(job=job, decision=None))
    assert running.leading(KEYS) == leading
    assert running.leading(()) == 0
