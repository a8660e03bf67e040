"""Whose numbers a profile's are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.sglang_plugin.setup.machine import computes_by, machine_name


def named(
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch_native",
    quantization: str | None = None,
    num_ranks: int = 1,
    is_cpu: bool = True,
) -> str:
    model: Any = SimpleNamespace(
        dtype=dtype, quantization=quantization, ranks=SimpleNamespace(size=num_ranks)
    )
    return machine_name("cpu", computes_by(model, backend, is_cpu=is_cpu), [Path("/disk")])


def test_what_changes_how_fast_a_model_is_computed_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    names = {
        named(),
        named(torch.float16),
        named(backend="intel_amx"),
        named(quantization="w8a8_int8"),
        named(num_ranks=2),
        named(is_cpu=False),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    names.add(named())
    assert len(names) == 7
    assert named(torch.float16).endswith(" cores, cpu, 8 threads, float16, torch_native; /disk")
    assert named(is_cpu=False) == named(is_cpu=False)
    assert "threads" not in named(is_cpu=False)
