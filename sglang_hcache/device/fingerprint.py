"""Names for weights that are in memory right now."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BLOCK, _CPU_BLOCK = 1 << 22, 1 << 18
"""int32 words handled at once: a GPU needs 100 MB for them beside the weights, a CPU keeps them in its cache."""
_MOST_THREADS = 8
"""Of a CPU. They come to the end of what its memory delivers."""


def weights_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """32 bytes that change when any name, shape, dtype or bit of the tensors changes.

    Each tensor is reduced where it lives (a few passes over memory, no copy to the host) to two sums over its
    32-bit words, one of them weighted by position; names and sums are then hashed. It detects different weights,
    not an adversary.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"hcache-wts-1")
    found = (part for name, tensor in named_tensors for part in _parts(name, tensor.detach()))
    parts = sorted(found, key=lambda item: item[0])
    sums = _sums_of_all([tensor for _, tensor in parts])
    for (name, tensor), (plain, weighted) in zip(parts, sums, strict=True):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|{plain}|{weighted}\n".encode())
    return digest.digest()


def parts_fingerprint(parts: Sequence[bytes]) -> bytes:
    """The fingerprint of weights that lie in several places, from those of the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return hashlib.blake2b(b"".join(parts), digest_size=32, person=b"hcache-parts-1").digest()


def adapter_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """32 bytes that change when any name, shape, dtype or bit of the tensors changes.

    A cryptographic hash of all bytes, unlike :func:`weights_fingerprint`: users may bring adapters of their own, and
    share a store.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"hcache-lora-1")
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that ``tensor`` is made of, as a quantised one is of integers and their scales."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in names:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def _sums_of_all(tensors: Sequence[torch.Tensor]) -> Sequence[tuple[int, int]]:
    """Those of each; on a CPU of several at once: one core would take six seconds for 7 billion 16-bit parameters."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return [_sums_anywhere(tensor) for tensor in tensors]
    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hcache-weights") as threads:
        return list(threads.map(_sums_anywhere, tensors))


def _sums_anywhere(tensor: torch.Tensor) -> tuple[int, int]:
    """As :func:`_sums`, on the CPU if the device has no room left, as in a trainer's process beside the model."""
    try:
        return _sums(tensor)
    except torch.OutOfMemoryError:
        return _sums(tensor.cpu())


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # words must begin at one
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.numel() else flat.to(torch.int32)
    is_on_cpu = words.device.type == "cpu"
    size = max(1, min(_CPU_BLOCK if is_on_cpu else _BLOCK, words.numel()))
    # Odd weights are invertible modulo 2**64, so one changed word always changes this sum.
    odd = torch.arange(1, 2 * size, 2, device=words.device)
    plain = weighted = 0
    for first in range(0, words.numel(), size):
        block = words[first : first + size]
        block_sums = _numpy_sums if is_on_cpu else _torch_sums
        block_plain, block_weighted = block_sums(block, odd[: block.numel()])
        plain += block_plain
        weighted += block_weighted + 2 * first * block_plain
    return plain % 2**64, weighted % 2**64


def _torch_sums(words: torch.Tensor, weights: torch.Tensor) -> tuple[int, int]:
    wide = words.to(torch.int64)
    return int(wide.sum()), int((wide * weights).sum())


def _numpy_sums(words: torch.Tensor, weights: torch.Tensor) -> tuple[int, int]:
    """Several times as fast as torch on a CPU, whose threads begin and end anew with each step."""
    wide = words.numpy().astype(np.int64)
    return int(wide.sum()), int(np.dot(wide, weights.numpy()))
