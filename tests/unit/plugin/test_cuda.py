"""What of a server on a GPU can be tested without one: which settings it gets, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.device.streams import device_name
from sglang_hcache.sglang_plugin import flags
from sglang_hcache.sglang_plugin.assembly import NEVER_RUN_ON_A_GPU
from sglang_hcache.sglang_plugin.bridge import Bridge
from sglang_hcache.sglang_plugin.support import device_problems

GPU_PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


@pytest.mark.parametrize(("device", "is_off"), [("cpu", False), ("cuda", True), (None, True)])
def test_prefill_runs_without_graphs_where_there_could_be_some(device: str | None, is_off: bool) -> None:
    """SGLang finds the device out later: None may be a GPU."""
    args = argparse.Namespace(device=device, disable_prefill_cuda_graph=False)
    flags._map_onto_sglang(args, HCacheConfig())
    assert args.disable_prefill_cuda_graph is is_off


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise", "full"])
def test_graphs_for_prefill_that_were_asked_for_are_refused(backend: str) -> None:
    (problem,) = device_problems("cuda", backend)
    assert "--cuda-graph-backend-prefill" in problem
    assert backend in problem
    assert device_problems("cpu", backend) == []


def test_other_devices_are_refused() -> None:
    assert device_problems("cuda", "disabled") == device_problems("cpu", "disabled") == []
    assert "'xpu'" in device_problems("xpu", "disabled")[0]


def test_who_starts_on_a_gpu_is_told_that_nobody_has() -> None:
    """Until somebody has: then this, the page and the warning change together."""
    assert "NOT TESTED ON A GPU" in NEVER_RUN_ON_A_GPU
    assert "docs/gpu.md" in NEVER_RUN_ON_A_GPU
    assert "Nothing of this version has run on a GPU." in GPU_PAGE.read_text(encoding="utf-8")


def test_a_profile_made_on_a_cpu_keeps_its_name() -> None:
    assert device_name("cpu", 0) == "cpu"


class _Passes:
    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin_pass(self, num_rows: int) -> None:
        self.begun.append(num_rows)


@pytest.mark.parametrize("skips", [True, False])
def test_decode_passes_that_are_replayed_are_left_alone(skips: bool) -> None:
    """Their hidden states are seen by nobody, and asking for their tokens would hold the scheduler up."""
    bridge, passes = object.__new__(Bridge), _Passes()
    bridge._capturing, bridge._skips_decode, bridge._tap = {"a"}, skips, passes  # type: ignore[assignment]
    assert bridge.begin_pass(["a"], 1, is_decode=True) is not skips
    assert bridge.begin_pass(["a", "b"], 70)
    assert not bridge.begin_pass(["b"], 9)
    assert passes.begun == ([70] if skips else [1, 70])
