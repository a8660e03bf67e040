"""A name for weights: what changes it, what does not, and that it stays what it was."""

from __future__ import annotations

import pytest
import torch

from sglang_hcache.device import fingerprint
from sglang_hcache.device.fingerprint import adapter_fingerprint, weights_fingerprint

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6) / 7


def name_of(weight: torch.Tensor, name: str = "weight") -> bytes:
    return weights_fingerprint([(name, weight)])


def test_it_is_what_it_was() -> None:
    """All that is on disk was stored under it."""
    odd = torch.arange(7, dtype=torch.uint8)
    expected = "b4e103d7c07ace3a84276ce973b2f27c19723714942e180c919a15640ef076af"
    assert weights_fingerprint([("weight", WEIGHT), ("odd", odd)]).hex() == expected
    assert weights_fingerprint([("odd", odd), ("weight", WEIGHT)]).hex() == expected, "in any order"


def test_every_bit_and_all_that_says_what_it_is_count() -> None:
    names = {
        name_of(WEIGHT),
        name_of(WEIGHT, "other"),
        name_of(WEIGHT.view(6, 4)),
        name_of(WEIGHT.view(torch.int32)),
    }
    bits = WEIGHT.view(torch.int32)
    for place in range(WEIGHT.numel()):
        for bit in (0, 15, 31):
            changed = bits.clone()
            changed.view(-1)[place] ^= -(2**31) if bit == 31 else 2**bit
            names.add(name_of(changed.view(torch.float32)))
    swapped = WEIGHT.clone()
    swapped[0, 0], swapped[0, 1] = WEIGHT[0, 1], WEIGHT[0, 0]
    names.add(name_of(swapped))
    assert len(names) == 4 + 3 * WEIGHT.numel() + 1


def test_large_ones_are_summed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = name_of(WEIGHT)
    monkeypatch.setattr(fingerprint, "_CPU_BLOCK", 5)
    assert name_of(WEIGHT) == whole


def test_every_device_sums_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.randn(100_001, generator=torch.Generator().manual_seed(1)) * 1e30
    on_cpu = name_of(large)
    monkeypatch.setattr(fingerprint, "_numpy_sums", fingerprint._torch_sums)
    assert name_of(large) == on_cpu


def test_where_a_device_has_no_room_the_cpu_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sums, calls = name_of(WEIGHT), fingerprint._sums, 0

    def full_at_first(tensor: torch.Tensor) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sums(tensor)

    monkeypatch.setattr(fingerprint, "_sums", full_at_first)
    assert name_of(WEIGHT) == whole
    assert calls == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_where_the_values_lie_does_not_count(dtype: torch.dtype) -> None:
    """A weight may be a part of a larger one, from any value on, or lie across."""
    values = torch.arange(24).to(dtype)
    for begin in range(5):
        whole = torch.zeros(40, dtype=dtype)
        part = whole[begin : begin + 24]
        part[:] = values
        assert name_of(part) == name_of(values)
    across = values.view(4, 6).t().contiguous().t()
    assert name_of(across) == name_of(values.view(4, 6))


def test_an_adapter_s_is_what_it_was() -> None:
    """What is on disk of its requests was stored under it."""
    half = WEIGHT.to(torch.bfloat16)
    expected = "ef84fe87c3c363ab05504aafb5ce8e9bcc45b91a6a613a8c7a929f90c654320e"
    assert adapter_fingerprint([("a", WEIGHT), ("b", half)]).hex() == expected
    assert adapter_fingerprint([("b", half), ("a", WEIGHT)]).hex() == expected, "in any order"


def test_all_of_an_adapter_counts() -> None:
    changed = WEIGHT.clone()
    changed.view(torch.int32)[3, 5] ^= 1
    variants = [
        [("a", WEIGHT)],
        [("b", WEIGHT)],
        [("a", changed)],
        [("a", WEIGHT.view(6, 4))],
        [("a", WEIGHT.view(torch.int32))],
        [("a", WEIGHT.t())],
        [("a", WEIGHT), ("b", WEIGHT)],
        [],
    ]
    assert len({adapter_fingerprint(tensors) for tensors in variants}) == len(variants)
    assert adapter_fingerprint([("a", WEIGHT.t().contiguous().t())]) == adapter_fingerprint([("a", WEIGHT)])
