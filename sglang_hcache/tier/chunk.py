"""What the tiers know about a chunk besides its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_hcache.core.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Identity of a sealed chunk.

    Args:
        key: the chunk's name, 32 bytes.
        parent: key of the chunk before it in its prefix (the namespace's root key for the first).
        index: position in the prefix, in chunks.
        namespace_id: 16 bytes.
    """

    key: ChunkKey
    parent: ChunkKey
    index: int
    namespace_id: bytes


def form_runs(chunks: Iterable[ChunkInfo], max_chunks: int) -> Iterator[list[ChunkInfo]]:
    """Group ``chunks`` into runs: consecutive chunks of one prefix, at most ``max_chunks`` each.

    Every chunk is in exactly one run. Where prefixes branch, one branch continues its parent's run and the
    others begin runs of their own.
    """
    remaining = {chunk.key: chunk for chunk in chunks}
    children: dict[ChunkKey, list[ChunkInfo]] = {}
    for chunk in remaining.values():
        children.setdefault(chunk.parent, []).append(chunk)
    heads = [chunk for chunk in remaining.values() if chunk.parent not in remaining]
    while heads:
        run = [heads.pop()]
        while len(run) < max_chunks and (following := children.get(run[-1].key, [])):
            run.append(following[0])
            heads.extend(following[1:])
        if len(run) == max_chunks:
            heads.extend(children.get(run[-1].key, []))
        yield run
