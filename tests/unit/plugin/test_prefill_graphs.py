"""CUDA graphs for prefill, on by default: of which sizes, of which models, and what is said of them."""

from __future__ import annotations

import argparse
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.sglang_plugin.compat.v0_5_17 import runner
from sglang_hcache.sglang_plugin.launch import tier_arguments
from sglang_hcache.sglang_plugin.launch.prefill_graphs import SIZES, limit_sizes, log_line


def _mapped(device: str | None, **given: object) -> argparse.Namespace:
    """What becomes of arguments; SGLang's own defaults where none are given."""
    defaults = {
        "disable_prefill_cuda_graph": False,
        "cuda_graph_config": None,
        "cuda_graph_backend_prefill": None,
        "cuda_graph_bs_prefill": None,
        "cuda_graph_max_bs_prefill": None,
    }
    args = argparse.Namespace(device=device, **(defaults | given))
    tier_arguments._map_onto_sglang(args, HCacheConfig())
    return args


@pytest.mark.parametrize(("device", "is_chosen"), [("cpu", False), ("cuda", True), (None, True)])
def test_sizes_are_chosen_and_nothing_else(device: str | None, is_chosen: bool) -> None:
    """A backend that is given SGLang does not test. It finds the device out later: None may be a GPU."""
    args = _mapped(device)
    assert args.cuda_graph_bs_prefill == (list(SIZES) if is_chosen else None)
    assert (args.cuda_graph_backend_prefill, args.disable_prefill_cuda_graph) == (None, False)
    assert args.cuda_graph_config is None


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"cuda_graph_bs_prefill": [100]}, [100]),
        ({"cuda_graph_config": {"prefill": {"bs": [100]}}}, None),
        ({"cuda_graph_max_bs_prefill": 20}, [4, 8, 16]),
        ({"cuda_graph_max_bs_prefill": 8192}, list(SIZES)),
        ({"cuda_graph_max_bs_prefill": 20, "cuda_graph_config": {"prefill": {"max_bs": 40}}}, [4, 8, 16, 32]),
        ({"cuda_graph_config": {"decode": {"max_bs": 8}}}, list(SIZES)),
        ({"cuda_graph_config": {"prefill": {"bs": []}}}, list(SIZES)),
    ],
)
def test_sizes_that_are_given_are_kept(given: dict[str, Any], sizes: list[int] | None) -> None:
    args = _mapped("cuda", **given)
    assert args.cuda_graph_bs_prefill == sizes
    assert args.cuda_graph_config == given.get("cuda_graph_config")


@pytest.mark.parametrize(
    ("given", "layers", "largest_pass", "kept"),
    [
        (SIZES, 40, 8192, list(SIZES)),  # Llama-2-13B
        (SIZES, 80, 8192, [size for size in SIZES if size <= 512]),
        (SIZES, 40, 256, [size for size in SIZES if size <= 256]),
        (SIZES, 40, 300, [size for size in SIZES if size <= 384]),
        ((700, 1000), 80, 256, [700, 1000]),  # the user's own
        ((64, 2048), 40, 8192, [64]),
    ],
)
def test_sizes_have_a_limit(
    given: tuple[int, ...], layers: int, largest_pass: int, kept: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    shape = ModelShape(
        name="large", num_layers=layers, hidden_size=5120, num_heads=40, num_kv_heads=40, head_size=128,
        ffn=FFNKind.GATED, ffn_size=13824, hidden_dtype_bytes=2, kv_dtype_bytes=2,
    )  # fmt: skip
    prefill = SimpleNamespace(backend="breakable", bs=list(given))
    limit_sizes(prefill, shape, largest_pass, stores_hidden=True)
    assert (prefill.backend, prefill.bs) == ("breakable", kept)
    assert ("more than 1,024 tokens are not recorded" in caplog.text) is (max(given) > 1024)
    none_left = SimpleNamespace(backend="breakable", bs=[2048])
    limit_sizes(none_left, shape, 8192, stores_hidden=True)
    assert none_left.backend == "disabled"
    for_kv = SimpleNamespace(backend="breakable", bs=list(SIZES))
    limit_sizes(for_kv, shape, 8192, stores_hidden=False)
    assert for_kv.bs == list(SIZES), "there is nothing that would take device memory"


def test_sglang_replays_short_prefills_with_our_graphs() -> None:
    """Those behind a hit on the device: it takes no graph that would be less than half full."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    graphs = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)  # a GPU makes the others
    graphs._is_full_backend, graphs.has_mha_companion_layers = False, False
    graphs.prefill_backend_name, graphs.capture_num_tokens = "breakable", list(SIZES)
    graphs.max_num_tokens = max(SIZES)

    def is_replayed(count: int) -> bool:
        return graphs.can_replay_locally(
            batch_size=1, num_tokens=count, input_embeds=None, replace_embeds=None, prefix_lens=[64],
            is_target_verify=False, capture_hidden_mode=None, return_logprob=False,
        )  # fmt: skip

    assert [count for count in range(1, 1026) if not is_replayed(count)] == [1, 1025]


@pytest.mark.parametrize(
    ("module", "name", "is_recorded"),
    [
        ("llama", "LlamaModel", True),
        ("qwen3", "Qwen3Model", True),
        ("gemma", "GemmaModel", True),
        ("commandr", "CohereModel", False),  # takes no embeddings
        ("baichuan", "BaiChuanModel", False),
        ("xverse_moe", "XverseModel", False),
        ("phi", "PhiModel", False),  # the batch before the positions
        ("opt", "OPTModel", False),  # its layers lie deeper than SGLang looks
    ],
)
def test_models_whose_prefills_sglang_cannot_record_start_without(
    module: str, name: str, is_recorded: bool
) -> None:
    kind = getattr(import_module(f"sglang.srt.models.{module}"), name)
    inner = kind.__new__(kind)
    nn.Module.__init__(inner)
    if name != "OPTModel":
        inner.layers = nn.ModuleList()
    model = nn.Module()
    model.model = inner
    prefill = SimpleNamespace(backend="breakable", bs=[4])
    runner._leave_prefill_eager(model, prefill)
    assert prefill.backend == ("breakable" if is_recorded else "disabled")


def test_empty_sizes_are_no_passes() -> None:
    graphs = SimpleNamespace(
        decode=SimpleNamespace(backend="full", bs=[1, 2]), prefill=SimpleNamespace(backend="breakable", bs=[])
    )
    assert runner._most_replayed(SimpleNamespace(cuda_graph_config=graphs)) == 2


def test_the_log_says_what_sglang_has_recorded() -> None:
    from sglang.srt.model_executor.runner import EagerRunner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    graphs = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)
    graphs.max_num_tokens = 1024
    for recorded, most in ((graphs, 1024), (EagerRunner.__new__(EagerRunner), 0), (None, 0)):
        assert runner.longest_replayed_prefill(SimpleNamespace(prefill_cuda_graph_runner=recorded)) == most
    assert "up to 1,024 tokens" in log_line(1024)
    assert "are off" in log_line(0)
