"""What is given back for a decode pass: for the pages that it takes, not for one of each request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_hcache.sglang_plugin.hooks import _pages_taken
from tests.unit.plugin.compat.bare_tree import BareTree

PAGE = 16


class Tree(BareTree):
    """An empty tree over a pool of pages, of which restores hold what is not free."""

    def __init__(self, free: int, held: int) -> None:
        self.free_tokens, self.held = free, held
        allocator = SimpleNamespace(
            device="cpu",
            page_size=PAGE,
            available_size=lambda: self.free_tokens,
            alloc_decode=lambda seq_lens, *_: torch.zeros(len(seq_lens), dtype=torch.int64),
        )
        bridge = SimpleNamespace(wants_evictions=False, restores=SimpleNamespace(give_back=self._give_back))
        super().__init__(allocator, bridge, PAGE)

    def _give_back(self) -> bool:
        if not self.held:
            return False
        self.held -= PAGE
        self.free_tokens += PAGE
        return True

    def decode(self, lengths: list[int]) -> None:
        """As SGLang has room made for one more token of requests of ``lengths`` tokens."""
        after = torch.tensor(lengths) + 1
        _pages_taken(
            allocation.alloc_paged_token_slots_decode,
            tree_cache=self,
            seq_lens=after,
            seq_lens_cpu=after,
            last_loc=torch.zeros(len(lengths), dtype=torch.int64),
        )


@pytest.mark.parametrize(
    ("lengths", "free", "given_back"),
    [
        ([20] * 8, 0, 0),  # none comes to the end of its page
        ([20] * 7 + [32], PAGE, 0),
        ([20] * 6 + [32, 48], PAGE, PAGE),
        ([32] * 8, 0, 4 * PAGE),  # all there is
    ],
)
def test_only_as_much_as_the_pass_takes(lengths: list[int], free: int, given_back: int) -> None:
    tree = Tree(free, held=4 * PAGE)
    tree.decode(lengths)
    assert 4 * PAGE - tree.held == given_back


def test_all_that_is_wanted_by_others() -> None:
    tree = Tree(free=0, held=4 * PAGE)
    tree.decode([20] * 8)
    tree.evict(EvictParams(num_tokens=3 * PAGE))
    assert tree.held == PAGE
