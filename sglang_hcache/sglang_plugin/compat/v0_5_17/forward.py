"""A forward pass outside the scheduler, for the self-check."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import HCacheRadixCache


class ForwardOf:
    """One prompt in one borrowed row of the request table, while nobody else runs."""

    def __init__(self, runner: Any, cache: HCacheRadixCache) -> None:
        self._runner = runner
        self._cache = cache

    @torch.inference_mode()
    def forward(self, tokens: list[int]) -> torch.Tensor:
        count, device = len(tokens), self._runner.device
        slots = self.allocate(count)
        row = self._cache.req_to_token_pool.free_slots[0]  # borrowed: nobody runs yet
        self._cache.req_to_token_pool.req_to_token[row, :count] = slots[:count].to(torch.int32)
        batch = _extend_batch(tokens, row, slots[:count], device)
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            self._runner.attn_backend.init_forward_metadata(batch)
            self._runner.model.model(batch.input_ids, batch.positions, batch)
        return slots[:count]

    def allocate(self, count: int) -> torch.Tensor:
        slots = self._cache.allocate(_round_up(count, self._cache.page_size))
        assert slots is not None, "the KV pool is too small for the self-check"
        return slots

    def release(self, slots: torch.Tensor) -> None:
        self._cache.free(slots)


def _extend_batch(tokens: list[int], row: int, slots: torch.Tensor, device: Any) -> ForwardBatch:
    count = len(tokens)
    lengths = torch.tensor([count], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor([row], dtype=torch.int64, device=device),
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=count,
        out_cache_loc=slots,
        positions=torch.arange(count, device=device),
        extend_num_tokens=count,
        extend_seq_lens=lengths.to(torch.int32),
        extend_prefix_lens=zero.to(torch.int32),
        extend_start_loc=zero.to(torch.int32),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[0],
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
