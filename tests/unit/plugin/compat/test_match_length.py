"""How much of a prompt is on the device, asked without touching the device."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hcache.core.layout import CHUNK_TOKENS
from tests.unit.plugin.compat.bare_tree import BareTree

PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), max_size=4)
"""Tokens in stretches of equal ones: prompts share beginnings, and part anywhere."""


def prompt(pieces: list[tuple[int, int]]) -> array[int]:
    return array("q", [token for token, count in pieces for _ in range(count)])


def tree_of(prompts: list[tuple[array[int], str | None]], page_size: int = 1) -> BareTree:
    tree = BareTree(SimpleNamespace(device="cpu"), None, page_size)
    for tokens, tenant in prompts:
        tree.insert(InsertParams(key=RadixKey(tokens, tenant), value=torch.arange(len(tokens))))
    return tree


def num_nodes(tree: BareTree) -> int:
    count, left = 0, [tree.root_node]
    while left:
        node = left.pop()
        count += 1
        left += node.children.values()
    return count


TENANTS = st.sampled_from([None, "a"])


@pytest.mark.parametrize("page_size", [1, CHUNK_TOKENS])
@given(stored=st.lists(st.tuples(PIECES, TENANTS), max_size=6), asked=PIECES, tenant=TENANTS)
def test_it_is_the_length_of_the_match(
    page_size: int,
    stored: list[tuple[list[tuple[int, int]], str | None]],
    asked: list[tuple[int, int]],
    tenant: str | None,
) -> None:
    tree = tree_of([(prompt(pieces), whose) for pieces, whose in stored], page_size)
    before = num_nodes(tree)
    found = tree.match_length(prompt(asked), tenant)
    assert num_nodes(tree) == before, "nothing is split"
    assert found == len(tree.match_tokens(prompt(asked), tenant))


def test_what_is_looked_at_is_used() -> None:
    tree = tree_of([(prompt([(1, CHUNK_TOKENS)]), None)])
    (node,) = tree.root_node.children.values()
    before = node.last_access_time
    assert tree.match_length(prompt([(1, CHUNK_TOKENS), (2, 9)]), None) == CHUNK_TOKENS
    assert node.last_access_time > before
