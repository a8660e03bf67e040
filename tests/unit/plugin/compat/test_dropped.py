"""What the tiers are told when SGLang's radix tree evicts."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, TypeAlias

import hypothesis.strategies as st
import torch
from hypothesis import given
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_hcache.core.keys import chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.sglang_plugin.serving.bridge import _keys_behind
from tests.unit.plugin.compat.bare_tree import BareTree

Told: TypeAlias = "tuple[array[int], list[array[int]], str | None]"


class Tree(BareTree):
    """Without a pool."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.gone: list[tuple[tuple[int, ...], str | None]] = []
        """Prefixes that end at a multiple of 64 in a node that went."""
        allocator = SimpleNamespace(
            device="cpu", available_size=lambda: 0, free_segment=lambda *_, **__: None
        )
        bridge = SimpleNamespace(
            wants_evictions=True,
            evicted=lambda *told: self.told.append(told),
            restores=SimpleNamespace(give_back=lambda: False),
        )
        super().__init__(allocator, bridge)

    def put(self, tokens: list[int], tenant: str | None = None) -> None:
        key = RadixKey(array("q", tokens), tenant)
        self.insert(InsertParams(key=key, value=torch.arange(len(tokens))))

    def drop(self, count: int) -> None:
        self.evict(EvictParams(num_tokens=count))

    def _delete_leaf(self, node: TreeNode) -> None:
        path: list[int] = []
        above: Any = node
        while above.parent is not None:
            path[:0] = above.key.raw_token_ids()
            above = above.parent
        begin = len(path) - len(node.key)
        ends = range(CHUNK_TOKENS * (begin // CHUNK_TOKENS + 1), len(path) + 1, CHUNK_TOKENS)
        self.gone += [(tuple(path[:end]), node.key.extra_key) for end in ends]
        super()._delete_leaf(node)


def root(tenant: str | None) -> bytes:
    return (tenant or "").encode().ljust(32)


def sizes(told: list[Told]) -> list[tuple[int, list[int]]]:
    """Tokens of each prefix, and of the branches behind it."""
    return [(len(prefix), [len(branch) for branch in branches]) for prefix, branches, _ in told]


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 150)), min_size=1, max_size=4),
        st.sampled_from([None, "tenant"]),
    ),
    min_size=1,
    max_size=6,
)


@given(PROMPTS, st.lists(st.integers(1, 400), max_size=5))
def test_every_chunk_that_goes_is_named_once(
    prompts: list[tuple[list[tuple[int, int]], str | None]], counts: list[int]
) -> None:
    tree = Tree()
    for runs, tenant in prompts:
        tree.put([token for token, count in runs for _ in range(count)], tenant)
    for count in [*counts, 10**9]:
        tree.told, tree.gone = [], []
        tree.drop(count)
        named = [
            key
            for prefix, branches, tenant in tree.told
            for key in _keys_behind(root(tenant), prefix, branches)
        ]
        assert sorted(named) == sorted(chunk_keys(root(tenant), path)[-1] for path, tenant in tree.gone)


def test_a_conversation_that_goes_turn_by_turn_is_one_path() -> None:
    tree, conversation = Tree(), list[int]()
    for turn in range(100):
        conversation += [turn] * CHUNK_TOKENS
        tree.put(conversation)
    tree.drop(10**9)
    assert tree.evictions == 100
    assert sizes(tree.told) == [(0, [100 * CHUNK_TOKENS])]


def test_what_was_asked_about_a_document_is_told_with_the_document_once() -> None:
    tree, document = Tree(), [7] * (10 * CHUNK_TOKENS + 5)
    for question in range(100):
        tree.put([*document, *[1000 + question] * CHUNK_TOKENS])
    tree.drop(99 * CHUNK_TOKENS)
    assert tree.evictions == 99
    assert sizes(tree.told) == [(len(document), [CHUNK_TOKENS] * 99)]


def test_of_one_that_goes_in_part_only_that_is_named() -> None:
    tree = Tree()
    for chunks in (1, 2, 3, 4):
        tree.put([7] * (CHUNK_TOKENS * chunks))
    tree.drop(2 * CHUNK_TOKENS)
    assert sizes(tree.told) == [(2 * CHUNK_TOKENS, [2 * CHUNK_TOKENS])]


def test_nothing_is_kept_for_tiers_that_do_not_want_it() -> None:
    tree = Tree()
    tree.put([7] * CHUNK_TOKENS)
    tree.bridge.wants_evictions = False  # type: ignore[misc]
    tree.drop(1)
    assert not tree.told
    assert not tree._dropped._nodes
