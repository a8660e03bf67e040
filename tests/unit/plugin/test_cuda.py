"""What of a server on a GPU can be tested without one: which settings it gets, and what is refused."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import PlanKind
from sglang_hcache.device.attention import Attention
from sglang_hcache.device.streams import device_name
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.sglang_plugin.compat.v0_5_17 import runner
from sglang_hcache.sglang_plugin.launch.support import determinism_problems, device_problems
from sglang_hcache.sglang_plugin.seam.gpu import DeviceBuffers
from sglang_hcache.sglang_plugin.seam.model import ServedModel
from sglang_hcache.sglang_plugin.serving.saving import Saving
from tests.unit.restore.delayed_streams import FORKED, DelayedStreams


def test_it_is_known_what_is_recorded() -> None:
    """Prefills, or a pass that ends a graph at attention: by SGLang's own runners and backends."""
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
        BreakableCudaGraphBackend,
    )
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        set_tc_piecewise_forward_context,
    )

    assert (runner.records_prefill(), runner.records_one_graph()) == (False, True)
    with set_tc_piecewise_forward_context(None, [], None, [], []):  # as PrefillCudaGraphRunner does
        assert (runner.records_prefill(), runner.records_one_graph()) == (True, False)
    for backend, is_one in ((FullCudaGraphBackend, True), (BreakableCudaGraphBackend, False)):
        recording = backend.__new__(backend)
        recording._pool, recording._deduped_cuda_graph = object(), None
        with recording.capture_session(None):
            assert (runner.records_prefill(), runner.records_one_graph()) == (False, is_one)
    assert (runner.records_prefill(), runner.records_one_graph()) == (False, True)


@pytest.mark.parametrize("backend", ["tc_piecewise", "full"])
def test_graphs_for_prefill_that_run_no_code_of_ours_are_refused(backend: str) -> None:
    (problem,) = device_problems("cuda", backend)
    assert "--cuda-graph-backend-prefill" in problem
    assert backend in problem
    assert device_problems("cpu", backend) == device_problems("cuda", "breakable") == []


def test_other_devices_are_refused() -> None:
    assert device_problems("cuda", "disabled") == device_problems("cpu", "disabled") == []
    assert "'xpu'" in device_problems("xpu", "disabled")[0]


@pytest.mark.parametrize("method", PlanKind)
def test_determinism_wants_the_same_bits(method: PlanKind) -> None:
    problems = determinism_problems(method)
    assert bool(problems) is (method not in (PlanKind.KV, PlanKind.RECOMPUTE))
    assert all("add --hcache-method kv" in problem for problem in problems)


def test_a_profile_made_on_a_cpu_keeps_its_name() -> None:
    assert device_name("cpu", 0) == "cpu"


class _Attends(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def _served(hidden_size: int, kv_heads: int) -> ServedModel:
    shape = ModelShape(
        name="tiny", num_layers=3, hidden_size=hidden_size, num_heads=8, num_kv_heads=kv_heads, head_size=8,
        ffn=FFNKind.GATED, ffn_size=16, hidden_dtype_bytes=4, kv_dtype_bytes=4,
    )  # fmt: skip
    attention = tuple(Attention(_Attends(), "attn", 8, kv_heads, 8) for _ in range(3))
    return ServedModel(nn.Module(), attention, "Tiny", shape, torch.float32, torch.float32, 100, 100, "{}")


@pytest.mark.parametrize(
    ("method", "kv_heads", "most_replayed", "is_there"),
    [
        (PlanKind.HIDDEN, 8, 4, True),
        (PlanKind.AUTO, 8, 4, True),
        (PlanKind.AUTO, 2, 4, False),  # K and V are the smaller ones: never hidden states
        (PlanKind.HIDDEN, 2, 4, True),
        (PlanKind.KV, 8, 4, False),
        (PlanKind.RECOMPUTE, 8, 4, False),
        (PlanKind.HIDDEN, 8, 0, False),  # decode passes are not recorded
    ],
)
def test_recorded_passes_leave_hidden_states_where_some_are_stored(
    method: PlanKind, kv_heads: int, most_replayed: int, is_there: bool
) -> None:
    model, streams = _served(64, kv_heads), DelayedStreams()
    buffers = DeviceBuffers.take(lambda: streams, model, method, most_replayed, lambda: True, lambda: True)
    assert (buffers.replayed is not None) is is_there
    streams.record(lambda: [attention.module(torch.ones(4, 64)) for attention in model.attention])()
    assert streams.queues[FORKED].asked == (3 if is_there else 0), (
        "joined, too, or the recording would not end"
    )
    if buffers.replayed is not None:
        assert buffers.replayed.holds(4, is_prefill=True)
        assert not buffers.replayed.holds(4, is_prefill=False)
        assert buffers.num_bytes == (
            buffers.stage.num_bytes + buffers.ring.num_bytes + buffers.replayed.num_bytes
        )
        assert buffers.replayed.num_bytes == 3 * 4 * 64 * 4


def test_buffers_are_as_wide_as_what_may_be_stored() -> None:
    """Several ranks store K and V alone, and each has a part of their heads."""

    def num_bytes(num_ranks: int) -> int:
        model = replace(_served(16384, 1), ranks=Mock(size=num_ranks))
        take = partial(DeviceBuffers.take, DelayedStreams, model, PlanKind.AUTO, 0)
        return take(lambda: False, lambda: False).num_bytes

    assert num_bytes(8) < num_bytes(1) / 2


class _Inner(nn.Module):
    layers = ()

    def forward(
        self, input_ids: object, positions: object, forward_batch: object, embeds: object
    ) -> None: ...


@pytest.mark.parametrize(("backend", "most_rows"), [("disabled", 2), ("breakable", 4)])
def test_forward_passes_go_before_restores_and_their_stream_is_fenced(
    backend: str, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    first, made_with = object(), []

    def streams(device: torch.device, others: list[object]) -> DelayedStreams:
        made_with.append((device, others))
        return DelayedStreams()

    monkeypatch.setattr(runner, "stream_that_goes_first", lambda device: first)
    monkeypatch.setattr(runner, "CudaStreams", streams)
    described: list[object] = []
    monkeypatch.setattr(
        runner.ServedModel, "of", lambda *known, **more: described.append((*known, more)) or _served(64, 8)
    )
    graphs = SimpleNamespace(
        decode=SimpleNamespace(backend="full", bs=[1, 2]), prefill=SimpleNamespace(backend=backend, bs=[1, 4])
    )
    checkpoint = SimpleNamespace(model=_Inner(), quant_config=SimpleNamespace(kv_cache_quant_algo="FP8"))
    config = SimpleNamespace(quantization="modelopt_fp8")
    ranks = object()
    model_runner = SimpleNamespace(
        device="cuda", gpu_id=1, forward_stream=object(), model=checkpoint, model_config=config, hcache_ranks=ranks,
        server_args=SimpleNamespace(
            cuda_graph_config=graphs, kv_cache_dtype="auto", torchao_config="", enable_deterministic_inference=False,
            enable_lora=True, device="cuda", get_attention_backends=lambda: ("fa3", "triton"),
            enable_fused_qk_norm_rope=False,
        ),
    )  # fmt: skip
    model_runner.configure_kv_cache_dtype = partial(ModelRunner.configure_kv_cache_dtype, model_runner)
    buffers = runner.device_buffers(model_runner, PlanKind.HIDDEN)
    assert described == [
        (
            checkpoint,
            config,
            torch.float8_e4m3fn,
            "modelopt_fp8",
            "cuda fa3 triton",
            {"has_adapters": True, "ranks": ranks},
        )
    ]
    assert model_runner.forward_stream is first
    assert made_with == [(torch.device("cuda", 1), [first])] * 3
    assert buffers is not None
    assert buffers.replayed is not None
    assert buffers.replayed.num_bytes == 3 * most_rows * 64 * 4  # of the largest pass that is recorded


def test_recorded_passes_have_the_priority_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own functions, with a stream of its group's module for a GPU's."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_hcache.sglang_plugin import hooks
    from sglang_hcache.sglang_plugin.seam import hooking

    targets: dict[str, object] = {}
    intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    monkeypatch.setattr(hooking, "apply", targets.update)
    # With effects beyond this test.
    monkeypatch.setattr(hooks, "register_radix_cache_backend", lambda *_: None)
    hooks.install("cpu")
    assert not {hooks._GRAPH_CAPTURE, hooks._LOOP} & targets.keys()
    assert hooks.cpu.fixes().keys() <= targets.keys()
    assert intervals == []
    targets.clear()
    hooks.install("cuda")
    assert not hooks.cpu.fixes().keys() & targets.keys()
    assert intervals == [hooks._SWITCH_S], "a decode pass is launched in a few milliseconds"
    assert targets[hooks._LOOP] == (runner.schedule_first, HookType.AROUND)
    hook, kind = targets[hooks._GRAPH_CAPTURE]  # type: ignore[misc]

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    capture = parallel_state.GroupCoordinator.graph_capture
    monkeypatch.setattr(parallel_state.GroupCoordinator, "graph_capture", capture)  # put back at the end
    HookRegistry.register(hooks._GRAPH_CAPTURE, hook, kind)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(parallel_state, "get_current_device_stream_fast", lambda: first)
    first = object()
    monkeypatch.setattr(runner, "stream_that_goes_first", lambda _device: first)
    group = object.__new__(parallel_state.GroupCoordinator)
    group.device = torch.device("cpu")
    group.ca_comm = group.pynccl_comm = group.pymscclpp_comm = group.torch_symm_mem_comm = None
    group.device_module = SimpleNamespace(Stream=object, stream=lambda _stream: nullcontext())
    with group.graph_capture(stream=None) as context:
        assert context.stream is first
    own = parallel_state.GraphCaptureContext(first)
    with group.graph_capture(own) as context:  # of the groups after the first one
        assert context is own


class _Stream:
    """One of ``torch.cuda``'s, which notes what it waits for."""

    device = torch.device("cuda", 1)

    def __init__(self, handle: int = 0, priority: int = 0) -> None:
        self.cuda_stream = handle
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


def test_batches_are_prepared_with_the_priority_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In SGLang's own ``run_event_loop``, whatever the loop is, and beside its forward passes."""
    from sglang.srt.managers import scheduler as managers

    forward, own, first = _Stream(1), _Stream(2), _Stream(3)
    drawn, entered = [], []

    def draw(device: torch.device, others: list[_Stream]) -> _Stream:
        drawn.append((device, others))
        return first

    def enter(stream: _Stream) -> nullcontext[None]:
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(runner, "stream_that_goes_first", draw)
    scheduler = SimpleNamespace(
        device="cuda", forward_stream=forward,
        device_module=SimpleNamespace(Stream=lambda **_: own, StreamContext=enter),
    )  # fmt: skip

    def loop(given: object) -> None:
        assert given is scheduler
        assert entered == [own, first]
        assert scheduler.schedule_stream is first
        assert first.waited_for == [own]

    monkeypatch.setattr(managers, "dispatch_event_loop", partial(runner.schedule_first, loop))
    managers.Scheduler.run_event_loop(scheduler)
    assert drawn == [(forward.device, [forward])], "or the passes would not overlap with it"


def test_a_cpu_has_neither_streams_nor_buffers() -> None:
    assert runner.device_buffers(SimpleNamespace(device="cpu"), PlanKind.HIDDEN) is None


class _Passes:
    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, tokens: torch.Tensor, _slots: torch.Tensor) -> None:
        self.begun.append(len(tokens))


def saving_of(passes: object, times: object) -> Saving:
    saving = object.__new__(Saving)
    saving.captured = {"a"}
    saving._passes, saving._prefill_times = passes, times  # type: ignore[assignment]
    saving._assembler = SimpleNamespace(wake=lambda: None)  # type: ignore[assignment]
    saving._has_failed = False
    return saving


def test_passes_of_requests_that_nobody_announced_are_left_alone() -> None:
    passes, timed = _Passes(), list[object]()
    saving = saving_of(passes, SimpleNamespace(begin=timed.append))
    assert saving.begin_pass(["a"], torch.zeros(1), torch.zeros(1))
    assert saving.begin_pass(["a", "b"], torch.zeros(70), torch.zeros(70))
    assert not saving.begin_pass(["b"], torch.zeros(9), torch.zeros(9))
    assert passes.begun == [1, 70]
    assert timed == [1, 70]


def test_a_gpus_prefills_are_timed_by_the_gpu_before_they_are_saved() -> None:
    """What it takes to ask for one says nothing of how long it takes."""
    done: list[object] = []
    saving = saving_of(
        SimpleNamespace(end=lambda _requests, *, is_replayed, is_prefill: done.append("saved")),
        SimpleNamespace(end=lambda requests, **_: done.append(requests[0].count)),
    )
    rows = [RequestRows("a", 128, 0, 64)]
    saving.end_pass(rows, is_typical=True, is_replayed=False)
    saving.end_pass(rows, is_typical=False, is_replayed=False)  # with logprobs of the prompt
    assert done == [64, "saved", "saved"]
