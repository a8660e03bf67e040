"""SGLang 0.5.17 on a CPU: attention of new tokens only, paged allocation without Triton, several ranks without NCCL.

The same fixes as ``patches/sglang-0.5.17/``, for servers that run SGLang as it was released.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import get_num_new_pages
from torch.nn.functional import scaled_dot_product_attention

from sglang_hcache.sglang_plugin.seam.hooking import Hook

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_GROUPS = "sglang.srt.distributed.parallel_state"


def fixes() -> dict[str, Hook]:
    """SGLang's functions (dotted names) and what to hook them with; without those that a patch has fixed."""
    found: dict[str, Hook] = {}
    if not hasattr(TorchNativeAttnBackend, "_make_causal_mask_reversed"):  # added by the patch
        found[f"{_ATTENTION}._run_sdpa_forward_extend"] = (extend_attention, HookType.REPLACE)
    if not hasattr(paged, "alloc_decode_naive"):  # added by the patch
        found[f"{_ALLOCATOR}.alloc_extend"] = (alloc_extend, HookType.REPLACE)
        found[f"{_ALLOCATOR}.alloc_decode"] = (alloc_decode, HookType.REPLACE)
    if not hasattr(parallel_state, "_BACKENDS_WITHOUT_PYNCCL"):  # added by the patch
        found[f"{_GROUPS}.init_model_parallel_group"] = (init_model_parallel_group, HookType.AROUND)
    return found


# -- attention -----------------------------------------------------------------------------------


def extend_attention(
    _backend: TorchNativeAttnBackend,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """``_run_sdpa_forward_extend`` without the rows of the prefix.

    SGLang's own pads the new tokens' queries with as many undefined rows as the prefix has tokens, and throws
    their results away.

    Args:
        query: (new tokens of all requests, heads, head_dim)
        output: the same shape, with the head_dim of V; filled and returned
        k_cache, v_cache: (slots, KV heads, head_dim)
        req_to_token: (rows, context length), slots
        req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens: (requests,)
    """
    lengths = zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    first_row = 0
    for index, (num_keys, prefix, num_new) in enumerate(lengths):
        first_key = 0
        if encoder_lens is not None:
            first_key, num_keys = (
                (0, encoder_lens[index]) if is_cross_attn else (encoder_lens[index], num_keys)
            )
        slots = req_to_token[req_pool_indices[index], first_key : first_key + num_keys]
        rows = slice(first_row, first_row + num_new)
        output[rows] = _attend(
            query[rows].movedim(0, 1),
            k_cache[slots].movedim(0, 1).to(query.dtype),
            v_cache[slots].movedim(0, 1).to(query.dtype),
            prefix=prefix,
            causal=causal,
            window=sliding_window_size if sliding_window_size is not None else -1,
            scaling=scaling,
            enable_gqa=enable_gqa,
        ).movedim(1, 0)
        first_row += num_new
    return output


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    prefix: int,
    causal: bool,
    window: int,
    scaling: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of one request's new tokens, which follow ``prefix`` others, to all its keys.

    Args:
        query: (heads, new tokens, head_dim)
        key, value: (KV heads, keys, head_dim)
        window: how far back a token sees; -1: to the beginning
    """
    mask = None
    is_reversed = causal and window < 0 and prefix > 0
    if window >= 0:
        mask = TorchNativeAttnBackend._make_sliding_window_mask(
            q_len=query.shape[1],
            kv_len=key.shape[1],
            sliding_window_size=window,
            device=query.device,
            query_offset=prefix,
        )
    elif is_reversed:
        query, mask = query.flip(1), causal_mask_reversed(query, key.shape[1])
    result = scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scaling,
        enable_gqa=enable_gqa,
    ).squeeze(0)
    return result.flip(1) if is_reversed else result


def causal_mask_reversed(query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """What to add to the scores of ``query`` (heads, new tokens, head_dim) with its tokens last first.

    The last token sees all keys, the one before it all but one, and so on: row i hides the last i keys. So
    (i, j) depends on i + j alone, and overlapping views of one line stand for the whole (new tokens, keys): no
    matrix to build in every layer, to read for every head, or to keep.
    """
    num_new = query.shape[1]
    line = query.new_zeros(num_keys + num_new - 1)
    line[num_keys:] = float("-inf")
    return line.as_strided((num_new, num_keys), (1, 1))


# -- paged allocation ----------------------------------------------------------------------------


def alloc_extend(
    allocator: paged.PagedTokenToKVPoolAllocator,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """Slots for the tokens ``[prefix_lens, seq_lens)`` of every request: the rest of its last page, then new ones.

    Returns:
        (extend_num_tokens,) int64, request after request; None if there are too few pages: none is taken then.
    """
    if num_new_pages is None:
        num_new_pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=allocator.page_size, prefix_lens=prefix_lens_cpu
        )
    pages = _take_pages(allocator, num_new_pages)
    if pages is None:
        return None
    slots = torch.empty(extend_num_tokens, dtype=torch.int64)
    paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, slots, allocator.page_size, "cpu")
    return slots


def alloc_decode(
    allocator: paged.PagedTokenToKVPoolAllocator,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """A slot for the last token of every request: after ``last_loc``, or the first of a new page.

    Returns:
        (requests,) int64; None if there are too few pages: none is taken then.
    """
    page_size = allocator.page_size
    begins_page = seq_lens % page_size == 1
    pages = _take_pages(allocator, int(begins_page.sum()))
    if pages is None:
        return None
    slots = last_loc.to(torch.int64) + 1
    slots[begins_page] = pages * page_size
    return slots


def _take_pages(allocator: paged.PagedTokenToKVPoolAllocator, count: int) -> torch.Tensor | None:
    if allocator.need_sort and count > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if count > len(allocator.free_pages):
        return None
    pages, allocator.free_pages = allocator.free_pages[:count], allocator.free_pages[count:]
    return pages


# -- several ranks -------------------------------------------------------------------------------


def init_model_parallel_group(
    original: Callable[..., Any],
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_pynccl: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leave NCCL out of a group that talks through gloo, unless the caller asks for it.

    SGLang leaves it out only where its library is missing. torch for CUDA brings the library, and with it the group
    looks for a GPU.
    """
    if backend == "gloo" and use_pynccl is None:
        use_pynccl = False
    return original(group_ranks, local_rank, backend, use_pynccl, *args, **kwargs)
