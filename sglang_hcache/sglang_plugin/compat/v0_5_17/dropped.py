"""What the radix tree drops at a time, in as few paths as name it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_hcache.core.layout import CHUNK_TOKENS

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode


class Dropped:
    """Nodes that were deleted, each after all below it.

    A chunk's name takes all tokens before it. The tree drops a conversation turn by turn from its end: with a path for
    each turn, hundreds of them would be as much work as all its prompts together, in one round of the scheduler.
    """

    def __init__(self) -> None:
        self._nodes: list[TreeNode] = []

    def add(self, node: TreeNode) -> None:
        """It is deleted."""
        self._nodes.append(node)

    def take(self) -> Iterator[tuple[array[int], str | None, int]]:
        """Tokens from the root, their tenant, and the first chunk that they complete and that was dropped with them.

        Every chunk that a node completed comes once.
        """
        nodes, self._nodes = self._nodes, []
        left = set(nodes)
        for node in nodes:
            if node not in left:
                continue
            top, dropped = node, 0
            while top in left:
                left.remove(top)
                dropped += len(top.key)
                top = top.parent
            kept = _depth(top)
            first_chunk = kept // CHUNK_TOKENS
            if first_chunk < (kept + dropped) // CHUNK_TOKENS:
                yield _path_tokens(node), node.key.extra_key, first_chunk


def _depth(node: TreeNode) -> int:
    """Tokens from the root to the end of ``node``."""
    tokens = 0
    while node.parent is not None:
        tokens += len(node.key)
        node = node.parent
    return tokens


def _path_tokens(node: TreeNode) -> array[int]:
    pieces = []
    while node.parent is not None:
        pieces.append(node.key.raw_token_ids())
        node = node.parent
    path = array("q")
    for piece in reversed(pieces):
        path.extend(piece)
    return path
