from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sglang_hcache.tier.chunk import ChunkInfo, form_runs


def chunk(key: int, parent: int, index: int) -> ChunkInfo:
    return ChunkInfo(key.to_bytes(32, "little"), parent.to_bytes(32, "little"), index, bytes(16))


@st.composite
def forests(draw: st.DrawFn) -> list[ChunkInfo]:
    """Chunks whose parents are other chunks of the list, or none of them; in any order."""
    chunks: list[ChunkInfo] = []
    depth = {0: -1}
    for key in range(1, draw(st.integers(1, 40))):
        parent = draw(st.sampled_from(sorted(depth)))
        depth[key] = depth[parent] + 1
        chunks.append(chunk(key, parent, depth[key]))
    kept = [item for item in chunks if draw(st.integers(0, 9))]  # some are not to be written: gaps
    return draw(st.permutations(kept))


@given(forests(), st.integers(1, 8))
def test_runs_partition_the_chunks_into_consecutive_pieces(chunks: list[ChunkInfo], most: int) -> None:
    runs = list(form_runs(chunks, most))
    assert sorted(item.key for run in runs for item in run) == sorted(item.key for item in chunks)
    for run in runs:
        assert 1 <= len(run) <= most
        for before, after in itertools.pairwise(run):
            assert after.parent == before.key
            assert after.index == before.index + 1


def test_a_plain_prefix_becomes_full_runs() -> None:
    chunks = [chunk(index + 1, index, index) for index in range(20)]
    assert [len(run) for run in form_runs(chunks, 8)] == [8, 8, 4]
