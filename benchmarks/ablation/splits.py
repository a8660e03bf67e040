"""How a restore is shared out between hidden states and K and V, by layers or by tokens: counting, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hcache.core.layout import CHUNK_TOKENS, Method
from sglang_hcache.plan.costs import LayerCosts
from sglang_hcache.plan.planner import Split, closed_form, make_plan
from sglang_hcache.sglang_plugin.seam.budget import MOST_BLOCK_CHUNKS

BLOCK_TOKENS = MOST_BLOCK_CHUNKS * CHUNK_TOKENS


def block_lengths(num_tokens: int) -> list[int]:
    """Tokens of each block of a restore."""
    return [min(BLOCK_TOKENS, num_tokens - first) for first in range(0, num_tokens, BLOCK_TOKENS)]


@dataclass(frozen=True)
class TokenSplit:
    """Of one block of tokens: the first ``hidden`` come back from hidden states, the others as K and V.

    Only whole chunks are stored. One that is shared is stored in both forms, and read in both.
    """

    hidden: int
    total: int

    @property
    def hidden_chunks(self) -> int:
        """Chunks read as hidden states, from the first one on."""
        return -(-self.hidden // CHUNK_TOKENS)

    @property
    def first_kv_chunk(self) -> int:
        """The first chunk read as K and V; the last one is the block's last."""
        return self.hidden // CHUNK_TOKENS


def token_splits(num_tokens: int, split: Split, *, rounded: bool) -> list[TokenSplit]:
    """Every block of ``num_tokens`` (a multiple of 64) shared out as ``split`` shares out layers.

    Args:
        rounded: in whole chunks, at least one of each method where there are two.

    Raises:
        ValueError: ``split`` recomputes layers, or has no hidden states or no K and V.
    """
    if split.recompute or not split.hidden or not split.kv:
        raise ValueError(f"shared out between hidden states and K and V, got {split}")
    splits = []
    for total in block_lengths(num_tokens):
        hidden = min(round(total * split.hidden / split.num_layers), total - 1)
        if rounded:
            chunks = total // CHUNK_TOKENS
            hidden = CHUNK_TOKENS * min(max(round(hidden / CHUNK_TOKENS), 1), max(chunks - 1, 1))
        splits.append(TokenSplit(hidden, total))
    return splits


def choose_split(costs: LayerCosts, num_layers: int) -> Split:
    """The fastest restore of ``num_layers`` layers that has both: one layer of each method at least."""
    splits = [Split(0, num_layers - kv, kv) for kv in range(1, num_layers)]
    return min(splits, key=lambda split: make_plan(split.methods(), costs).total_s)


def predicted_by_tokens(
    costs_of: Callable[[int], LayerCosts], splits: Sequence[TokenSplit], layers: int
) -> float:
    """Seconds, by the planner's own timeline: in each layer both reads, then both computations."""
    seconds = 0.0
    for split in splits:
        hidden, kv = costs_of(max(split.hidden, 1)), costs_of(max(split.total - split.hidden, 1))
        layer = LayerCosts(
            io_hidden_s=hidden.io_hidden_s + kv.io_kv_s,
            io_kv_s=hidden.io_kv_s + kv.io_kv_s,
            compute_hidden_s=hidden.compute_hidden_s + kv.compute_kv_s,
            compute_kv_s=hidden.compute_kv_s + kv.compute_kv_s,
            compute_recompute_s=hidden.compute_recompute_s + kv.compute_recompute_s,
            contention=hidden.contention,
        )
        seconds += make_plan((Method.HIDDEN,) * layers, layer).total_s
    return seconds


def closed_forms(costs: LayerCosts, num_layers: int, num_tokens: int) -> tuple[int | None, int | None]:
    """[HCache §4.1.2] for both: how many layers, and how many tokens, come back from hidden states.

    It balances two methods over L equal parts of the work, whatever the parts are: with tokens in place of layers it
    is the same formula. None where its assumptions do not hold, or where it wants a part recomputed, none as K and V.
    """
    try:
        forms = (closed_form(costs, num_layers), closed_form(costs, num_tokens))
    except ValueError:
        return None, None
    by_layers, by_tokens = (None if form.recompute else form.hidden for form in forms)
    return by_layers, by_tokens


def host_reads(
    row_bytes: Callable[[Method], int],
    num_layers: int,
    split: Split,
    splits: Sequence[TokenSplit] | None,
    length: int,
) -> tuple[int, int]:
    """Copies of one layer's chunks out of host memory, and their bytes.

    Args:
        row_bytes: of one token and layer.
        splits: of each block; None: by layers, as ``split`` says.
    """
    hidden, kv = row_bytes(Method.HIDDEN), row_bytes(Method.KV)
    if splits is None:
        blocks = -(-length // BLOCK_TOKENS)
        return blocks * num_layers, length * (split.hidden * hidden + split.kv * kv)
    chunks = [(each.hidden_chunks, each.total // CHUNK_TOKENS - each.first_kv_chunk) for each in splits]
    size = sum(first * hidden + second * kv for first, second in chunks)
    return 2 * num_layers * len(splits), num_layers * CHUNK_TOKENS * size
