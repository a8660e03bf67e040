"""Whose numbers a profile's are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.plan.costs import Hardware
from sglang_hcache.plan.profile import Profile, analytic_profile
from sglang_hcache.plan.shapes import NAMED_SHAPES
from sglang_hcache.sglang_plugin.setup.machine import computes_by, machine_name


def named(
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch_native",
    quantization: str | None = None,
    num_ranks: int = 1,
    is_cpu: bool = True,
    folder: str = "/disk",
) -> str:
    model: Any = SimpleNamespace(
        dtype=dtype, quantization=quantization, ranks=SimpleNamespace(size=num_ranks)
    )
    return machine_name("cpu", computes_by(model, backend, is_cpu=is_cpu), [Path(folder)])


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


def test_a_profile_of_odd_directories_can_be_read() -> None:
    names = {
        folder: named(folder=folder) for folder in ("/a\x1b[31mb", "/a\nb", "/a\udcffb", "/a\\nb", "/ä b")
    }
    assert names["/a\x1b[31mb"].endswith("; /a\\x1b[31mb")
    assert names["/ä b"].endswith("; /ä b")
    shape, hardware = NAMED_SHAPES["opt-30b"], Hardware(flops=1e14, io_bytes_per_s=1e9)
    for name in names.values():
        made = analytic_profile(shape, hardware, machine=name)
        assert Profile.from_json(made.to_json()) == made
