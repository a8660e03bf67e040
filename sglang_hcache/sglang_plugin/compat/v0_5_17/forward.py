"""Forward passes outside the scheduler's batches: for checks and measurements at start, and to recompute layers."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import HCacheRadixCache

_PADDING_ROW = 0
"""Of the request table: no request gets it, and what padded requests read there is thrown away."""


class ForwardOf:
    """Single sequences, between the scheduler's own passes."""

    def __init__(self, runner: Any, cache: HCacheRadixCache) -> None:
        self._runner = runner
        self._cache = cache

    def forward(self, tokens: list[int]) -> torch.Tensor:
        slots = self.allocate(len(tokens))[: len(tokens)]
        self._run(tokens, slots, 0)
        return slots

    def extend(self, tokens: array[int], slots: torch.Tensor, start: int, num_layers: int) -> None:
        model = self._runner.model.model
        end_layer = model.end_layer
        # As on the first rank of a pipeline: the model runs its layers up to end_layer.
        model.end_layer = num_layers
        try:
            self._run(tokens[start:].tolist(), slots, start)
        finally:
            model.end_layer = end_layer

    @torch.inference_mode()
    def _run(self, new_tokens: list[int], slots: torch.Tensor, start: int) -> None:
        table = self._cache.req_to_token_pool.req_to_token
        table[_PADDING_ROW, : len(slots)] = slots.to(torch.int32)
        batch = _extend_batch(new_tokens, _PADDING_ROW, slots[start:], start, self._runner.device)
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            self._runner.attn_backend.init_forward_metadata(batch)
            self._runner.model.model(batch.input_ids, batch.positions, batch)

    def allocate(self, count: int) -> torch.Tensor:
        slots = self._cache.allocate(_round_up(count, self._cache.page_size))
        assert slots is not None, "the KV pool is too small for the checks at start"
        return slots

    def release(self, slots: torch.Tensor) -> None:
        self._cache.free(slots)


def _extend_batch(tokens: list[int], row: int, slots: torch.Tensor, start: int, device: Any) -> ForwardBatch:
    count = len(tokens)
    lengths = torch.tensor([start + count], device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor([row], dtype=torch.int64, device=device),
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=start + count,
        out_cache_loc=slots,
        positions=torch.arange(start, start + count, device=device),
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[start],
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
