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

    A chunk's name takes all tokens before it. The tree drops a conversation turn by turn from its end, and what was
    asked about a document question by question: with a path for each, hundreds of them would be as much work as all
    their prompts together, in one round of the scheduler.
    """

    def __init__(self) -> None:
        self._nodes: list[TreeNode] = []

    def add(self, node: TreeNode) -> None:
        """It is deleted."""
        self._nodes.append(node)

    def take(self) -> Iterator[tuple[array[int], list[array[int]], str | None]]:
        """Tokens from the root, the branches behind them that were dropped, and the tenant of all.

        Every chunk that a dropped node completed is in one branch.
        """
        nodes, self._nodes = self._nodes, []
        left = set(nodes)
        branches: dict[tuple[TreeNode, str | None], list[array[int]]] = {}
        for node in nodes:
            if node in left:
                top = node
                while top in left:
                    left.remove(top)
                    top = top.parent
                branches.setdefault((top, node.key.extra_key), []).append(_tokens_between(top, node))
        for (top, tenant), dropped in branches.items():
            prefix = _tokens_between(None, top)
            begun = len(prefix) % CHUNK_TOKENS
            whole = [branch for branch in dropped if begun + len(branch) >= CHUNK_TOKENS]
            if whole:
                yield prefix, whole, tenant


def _tokens_between(above: TreeNode | None, node: TreeNode) -> array[int]:
    """Those behind the end of ``above`` (None: from the root) until the end of ``node``."""
    pieces = []
    while node is not above and node.parent is not None:
        pieces.append(node.key.raw_token_ids())
        node = node.parent
    tokens = array("q")
    for piece in reversed(pieces):
        tokens.extend(piece)
    return tokens
