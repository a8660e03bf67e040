from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.core.keys import (
    KEY_BYTES,
    NAMESPACE_ID_BYTES,
    Namespace,
    chunk_keys,
    next_key,
    token_bytes,
)
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout

NAMESPACE = Namespace(model=b"m" * 32, layout="float32")
TOKENS = st.lists(st.integers(0, 2**31), max_size=5 * CHUNK_TOKENS)


def test_a_key_names_every_token_before_it() -> None:
    root = NAMESPACE.root_key()
    tokens = list(range(4 * CHUNK_TOKENS))
    keys = chunk_keys(root, tokens)
    for changed in range(len(tokens)):
        other = chunk_keys(root, [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]])
        first = changed // CHUNK_TOKENS
        assert other[:first] == keys[:first]
        assert not set(other[first:]) & set(keys)


@given(TOKENS)
def test_keys_extend_a_prefix(tokens: list[int]) -> None:
    root = NAMESPACE.root_key()
    keys = chunk_keys(root, tokens)
    assert len(keys) == len(tokens) // CHUNK_TOKENS
    assert chunk_keys(root, tokens[:-1]) == keys[: max(0, len(tokens) - 1) // CHUNK_TOKENS]
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS)
def test_arrays_and_lists_give_the_same_keys(tokens: list[int]) -> None:
    assert token_bytes(tokens) == token_bytes(array("q", tokens))


def test_the_chain_can_be_continued_one_chunk_at_a_time() -> None:
    tokens = list(range(3 * CHUNK_TOKENS))
    key = NAMESPACE.root_key()
    for start in range(0, len(tokens), CHUNK_TOKENS):
        key = next_key(key, token_bytes(tokens[start : start + CHUNK_TOKENS]))
    assert key == chunk_keys(NAMESPACE.root_key(), tokens)[-1]
    with pytest.raises(ValueError, match="64 tokens"):
        next_key(key, token_bytes([1]))


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, model=b"n" * 32),
        replace(NAMESPACE, layout="bfloat16"),
        replace(NAMESPACE, tenant=""),
        replace(NAMESPACE, tenant="a"),
        replace(NAMESPACE, adapter=b"a" * 32),
    ],
)
def test_every_field_of_the_namespace_counts(other: Namespace) -> None:
    assert other.root_key() != NAMESPACE.root_key()
    assert other.namespace_id() != NAMESPACE.namespace_id()
    assert len(other.namespace_id()) == NAMESPACE_ID_BYTES


def test_ranks_share_the_id_and_no_key() -> None:
    ranks = [NAMESPACE, *(replace(NAMESPACE, rank=rank) for rank in range(3))]
    assert len({namespace.root_key() for namespace in ranks}) == 4
    assert {namespace.namespace_id() for namespace in ranks} == {NAMESPACE.namespace_id()}


namespaces = st.builds(
    Namespace,
    model=st.binary(max_size=2),
    layout=st.text(max_size=2),
    tenant=st.none() | st.text(max_size=2),
    adapter=st.none() | st.binary(max_size=2),
    rank=st.none() | st.integers(0, 20),
)


@given(namespaces, namespaces)
def test_fields_are_framed_without_ambiguity(one: Namespace, other: Namespace) -> None:
    assert (one.root_key() == other.root_key()) == (one == other)


def test_keys_are_frozen() -> None:
    """What is on disk stays readable: these values must never change."""
    keys = chunk_keys(NAMESPACE.root_key(), list(range(2 * CHUNK_TOKENS)))
    assert [key.hex()[:16] for key in keys] == FROZEN_KEYS
    assert NAMESPACE.namespace_id().hex()[:16] == FROZEN_NAMESPACE
    assert replace(NAMESPACE, tenant="a").namespace_id().hex()[:16] == FROZEN_NAMESPACE_OF_TENANT


FROZEN_KEYS = ["b033cd3a98619eb3", "8d2edb080ae66857"]
FROZEN_NAMESPACE = "465f0851cafc8638"
FROZEN_NAMESPACE_OF_TENANT = "21ff1dafdfd7b3ad"


def test_the_text_of_a_layout_is_part_of_every_name() -> None:
    """Another one, after a renaming, say, and nothing that is stored would be found."""
    layout = StateLayout((Method.HIDDEN, Method.KV), (64, 128))
    assert str(layout) == (
        "StateLayout(methods=(<Method.HIDDEN: 'hidden'>, <Method.KV: 'kv'>), row_bytes=(64, 128))"
    )
