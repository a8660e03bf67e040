"""Names for weights that are in memory right now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BLOCK = 1 << 24  # int32 words handled at once


def weights_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """32 bytes that change when any name, shape, dtype or bit of the tensors changes.

    Each tensor is reduced where it lives (a few passes over memory, no copy to the host) to two sums over its
    32-bit words, one of them weighted by position; names and sums are then hashed. It detects different weights,
    not an adversary.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"hcache-wts-1")
    parts = (part for name, tensor in named_tensors for part in _parts(name, tensor.detach()))
    for name, tensor in sorted(parts, key=lambda item: item[0]):
        plain, weighted = _sums(tensor)
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


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # words must begin at one
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and flat.numel() else flat.to(torch.int32)
    plain = weighted = 0
    for first in range(0, words.numel(), _BLOCK):
        block = words[first : first + _BLOCK].to(torch.int64)
        # Odd weights are invertible modulo 2**64, so one changed word always changes this sum.
        weights = torch.arange(2 * first + 1, 2 * (first + block.numel()), 2, device=block.device)
        plain += int(block.sum())
        weighted += int((block * weights).sum())
    return plain % 2**64, weighted % 2**64
