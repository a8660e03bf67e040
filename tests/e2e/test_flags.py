"""Command lines of the real server: what is accepted, what is refused and with which words. No model is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.cli.server.launch import prepare_launch

ON = ["--hierarchical-cache", "hcache"]
CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
"""Of a model's ``config.json``."""
WITH_WINDOWS = {
    **SMALL,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 128,
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 0],
}
WITH_LONGROPE = {
    **SMALL,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "pad_token_id": 0,
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32},
}


@dataclass(frozen=True)
class Refusal:
    """Arguments (after model, CPU settings and the tier's flag), and what the message must say."""

    arguments: list[str]
    says: tuple[str, ...]
    model: dict[str, Any] | None = None
    environment: tuple[str, ...] = ()
    """``NAME=VALUE``."""


REFUSALS = {
    "size": Refusal(["--hcache-host-size", "8x"], ("--hcache-host-size", "'8x'", "GiB")),
    "policy": Refusal(
        ["--hcache-write-policy", "never"], ("--hcache-write-policy", "'never'", "write_through")
    ),
    "method": Refusal(["--hcache-method", "magic"], ("--hcache-method", "'magic'", "hidden", "hybrid")),
    "disk at start": Refusal(
        ["--hcache-disk-at-start", "maybe"], ("--hcache-disk-at-start", "'maybe'", "optional")
    ),
    "engine": Refusal(["--hcache-io-engine", "uring"], ("--hcache-io-engine", "'uring'", "posix")),
    "too much memory": Refusal(
        ["--hcache-host-size", "900TB"], ("--hcache-host-size", "900.0 TB", "available")
    ),
    "too little memory": Refusal(["--hcache-host-size", "2MB"], ("--hcache-host-size", "at least 4.5 MB")),
    "too little disk": Refusal(
        ["--hcache-dirs", "/a", "--hcache-disk-size", "1MB"], ("--hcache-disk-size", "1.0 MB", "at least")
    ),
    "floor": Refusal(
        ["--hcache-dirs", "/a", "--hcache-disk-free-floor", "9999TB"],
        ("--hcache-disk-free-floor", "9999.0 TB", "the file system of /a has"),
    ),
    "not ours": Refusal(["--hcache-dirs", "{folder}"], ("holds other files ('typo.yaml')", "--hcache-dirs")),
    "too high a floor, and do without": Refusal(
        ["--hcache-dirs", "/a", "--hcache-disk-free-floor", "9999TB", "--hcache-disk-at-start", "optional"],
        ("--hcache-disk-free-floor", "9999.0 TB", "the file system of /a has"),
    ),
    "SGLang's file in one word": Refusal(
        ["--config=server.yaml"], ("overlooks --config=FILE", "--config FILE")
    ),
    "keys that nobody checks": Refusal(
        ["--tokenizer-worker-num", "2", "--admin-api-key", "k"],
        ("--admin-api-key cannot be used with --tokenizer-worker-num 2", "no key"),
    ),
    "keys that YAML made": Refusal(
        ["--config", "{folder}/../keys.yaml"],
        (
            "--api-key: 'None' is no key",
            "--admin-api-key: 'true' is no key",
            'in quotes there: api-key: "KEY"',
        ),
    ),
    "an empty key": Refusal(["--api-key", ""], ("--api-key: '' is no key",)),
    "no such file": Refusal(["--hcache-config", "/nowhere.yaml"], ("--hcache-config", "/nowhere.yaml")),
    "nodes": Refusal(["--nnodes", "2"], ("--nnodes", "got 2")),
    "ranks with hidden states": Refusal(
        ["--tp-size", "2", "--hcache-method", "hidden"],
        ("2 ranks (--tp-size)", "--hcache-method hidden", "auto or kv"),
    ),
    "ranks that drain adapters": Refusal(
        [
            *("--tp-size", "2", "--hcache-method", "kv", "--lora-paths", "one=/nowhere"),
            *("--lora-drain-wait-threshold", "1"),
        ],
        ("--tp-size 2", "--lora-drain-wait-threshold"),
    ),
    "ranks that delay prefills": Refusal(
        ["--tp-size", "2", "--enable-prefill-delayer", "--prefill-delayer-queue-min-ratio", "0.5"],
        ("--tp-size 2", "--prefill-delayer-queue-min-ratio"),
    ),
    "pp": Refusal(["--pp-size", "2"], ("--pp-size", "got 2")),
    "dp": Refusal(["--dp-size", "2"], ("--dp-size", "got 2")),
    "cp": Refusal(
        ["--attn-cp-size", "2", "--dcp-size", "4"],
        ("--attn-cp-size 1 only, got 2", "--dcp-size 1 only, got 4"),
    ),
    "page size": Refusal(["--page-size", "48"], ("--page-size", "48")),
    "speculative": Refusal(
        ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"],
        ("--speculative-algorithm: passes that verify are not captured",),
    ),
    "kv dtype": Refusal(["--kv-cache-dtype", "mxfp8"], ("--kv-cache-dtype mxfp8", "fp8_e4m3")),
    "bfloat16 kv": Refusal(["--kv-cache-dtype", "bf16"], ("--kv-cache-dtype bf16", "float16", "use auto")),
    "hidden states beside fp8": Refusal(
        ["--kv-cache-dtype", "fp8_e4m3", "--hcache-method", "hidden"],
        ("--hcache-method hidden", "float8_e4m3", "--kv-cache-dtype"),
    ),
    "hidden states of quantised weights": Refusal(
        ["--torchao-config", "int8wo", "--hcache-method", "hidden"],
        ("--hcache-method hidden", "torchao int8wo"),
    ),
    "disaggregation": Refusal(["--disaggregation-mode", "prefill"], ("--disaggregation-mode",)),
    "lmcache": Refusal(["--enable-lmcache"], ("--enable-lmcache",)),
    "another cache": Refusal(
        ["--radix-cache-backend", "lru", "--enable-flexkv"],
        ("--radix-cache-backend: the tier is", "--enable-flexkv: FlexKV"),
    ),
    "radix off": Refusal(["--disable-radix-cache"], ("--disable-radix-cache",)),
    "hicache": Refusal(["--enable-hierarchical-cache"], ("--enable-hierarchical-cache",)),
    "memory of HiCache": Refusal(
        ["--hicache-size", "200", "--hicache-ratio", "3"],
        ("--hicache-size 200: use --hcache-host-size", "--hicache-ratio 3.0: use --hcache-host-size"),
    ),
    "policy of HiCache": Refusal(
        ["--hicache-write-policy", "write_back"],
        ("--hicache-write-policy write_back: use --hcache-write-policy",),
    ),
    "transfers of HiCache": Refusal(
        ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"],
        ("--hicache-io-backend direct: it sets SGLang's HiCache", "--hicache-mem-layout layer_first"),
    ),
    "storage of HiCache": Refusal(
        ["--hicache-storage-backend", "file"], ("--hicache-storage-backend file: use --hcache-dirs",)
    ),
    "settings of HiCache's storage": Refusal(
        ["--hicache-storage-prefetch-policy", "best_effort", "--hicache-storage-backend-extra-config", "{}"],
        ("--hicache-storage-prefetch-policy best_effort", "--hicache-storage-backend-extra-config {}"),
    ),
    "preemption": Refusal(["--enable-priority-scheduling"], ("--disable-priority-preemption",)),
    "forward hooks": Refusal(["--forward-hooks", '[{"name": "x"}]'], ("--forward-hooks",)),
    "adapters loaded beside passes": Refusal(
        ["--lora-paths", "one=/nowhere", "--enable-lora-overlap-loading"], ("--enable-lora-overlap-loading",)
    ),
    "hidden states of adapters": Refusal(
        [
            *("--lora-paths", "one=/nowhere", "--max-lora-rank", "8", "--lora-target-modules", "all"),
            *("--hcache-method", "hidden"),
        ],
        ("--hcache-method hidden", "--enable-lora", "use auto or kv"),
    ),
    "bits without a radix cache": Refusal(
        ["--enable-deterministic-inference", "--hcache-method", "kv", "--attention-backend", "flashinfer"],
        ("--enable-deterministic-inference", "--attention-backend", "triton"),
    ),
    "embeddings": Refusal(["--is-embedding"], ("LlamaForCausalLM", "no text generation")),
    "sessions": Refusal(["--enable-streaming-session"], ("--enable-streaming-session",)),
    "sessions in the tree": Refusal(["--enable-session-radix-cache"], ("--enable-session-radix-cache",)),
    "weights elsewhere": Refusal(["--cpu-offload-gb", "1"], ("--cpu-offload-gb: weights are not",)),
    "offloaded layers": Refusal(["--offload-group-size", "2"], ("--offload-group-size",)),
    "experts on the CPU": Refusal(
        ["--kt-weight-path", "/nowhere", "--kt-method", "AMXINT4"], ("--kt-weight-path", "fingerprint")
    ),
    "compiled layers": Refusal(["--enable-torch-compile"], ("--enable-torch-compile: compiled layers",)),
    "diffusion": Refusal(["--dllm-algorithm", "LowConfidence"], ("--dllm-algorithm: diffusion models",)),
    "multiplexing": Refusal(["--enable-pdmux"], ("--enable-pdmux: prefill and decode",)),
    "canary": Refusal(["--kv-canary", "log"], ("--kv-canary: it takes",)),
    "weights that are fetched": Refusal(
        ["--tp-size", "2", "--dwdp-size", "2"], ("--dwdp-size 1 only, got 2",)
    ),
    "a server in Rust": Refusal(
        [], ("SGLANG_RUST_SERVER in the environment",), environment=("SGLANG_RUST_SERVER=1",)
    ),
    "gRPC alone": Refusal(["--smg-grpc-mode"], ("--smg-grpc-mode: told to stop",)),
    "gRPC alone, by its old name": Refusal(["--grpc-mode"], ("--grpc-mode: told to stop",)),
    "actors": Refusal(["--use-ray"], ("--use-ray: its actors",)),
    "heads before tokens": Refusal(
        [], ("SGLANG_USE_HND_KVCACHE in the environment",), environment=("SGLANG_USE_HND_KVCACHE=1",)
    ),
    "a pool that is sized after graphs": Refusal(
        [],
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING in the environment",),
        environment=("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1",),
    ),
    "a tree that finds nothing": Refusal(
        [], ("SGLANG_RADIX_FORCE_MISS in the environment",), environment=("SGLANG_RADIX_FORCE_MISS=1",)
    ),
    "experts drawn by lot": Refusal(
        [],
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS in the environment",),
        environment=("SGLANG_SIMULATE_UNIFORM_EXPERTS=1",),
    ),
    "experts in turns": Refusal(
        [],
        ("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS in the environment",),
        environment=("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS=1",),
    ),
    "pages before layers": Refusal(["--enable-page-major-kv-layout"], ("--enable-page-major-kv-layout",)),
    "one pool for all": Refusal(["--enable-unified-memory"], ("--enable-unified-memory",)),
    "sparse": Refusal(["--enable-hisparse"], ("--enable-hisparse",)),
    "Mamba in eight bits": Refusal(["--enable-int8-mamba-checkpoint"], ("--enable-int8-mamba-checkpoint",)),
    "halves": Refusal(["--enable-two-batch-overlap"], ("--enable-two-batch-overlap",)),
    "experts": Refusal(["--enable-return-routed-experts"], ("--enable-return-routed-experts",)),
    "several items": Refusal(["--enable-mis"], ("--enable-mis",)),
    "images": Refusal(
        [],
        ("Qwen2VLForConditionalGeneration", "multimodal input"),
        {
            **SMALL,
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 256},
        },
    ),
    "prompts that see themselves whole": Refusal(
        [],
        ("this model", "without a radix cache"),
        {
            **SMALL,
            "architectures": ["HrmTextForCausalLM"],
            "model_type": "llama",
        },
    ),
    "dual chunk attention": Refusal(
        ["--attention-backend", "dual_chunk_flash_attn"],
        ("this model", "without a radix cache"),
        {
            **SMALL,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "dual_chunk_attention_config": {"chunk_size": 1024, "local_size": 256},
        },
    ),
    "mla": Refusal(
        [],
        ("DeepseekV2ForCausalLM", "attention kind MLA"),
        {
            **SMALL,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "what SGLang refuses with its own": Refusal(
        [],
        ("does not support this model", "Hierarchical cache for MiMoV2 requires"),
        {
            **SMALL,
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "llama",
            "sliding_window": 128,
            "hybrid_layer_pattern": [1, 0],
        },
    ),
    "factors of the longest in a pass": Refusal(
        [],
        ("Phi3ForCausalLM", "longrope rotation beyond 512 tokens", "--context-length 512"),
        WITH_LONGROPE,
    ),
    "factors of the longest pass": Refusal(
        ["--model-impl", "transformers"],
        ("LlamaForCausalLM", "dynamic rotation beyond 512 tokens"),
        {
            **SMALL,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 512,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        },
    ),
    "sliding window": Refusal(
        [],
        (
            "MistralForCausalLM",
            "layers that keep a sliding window only; --disable-hybrid-swa-memory keeps K and V",
        ),
        WITH_WINDOWS,
    ),
}


@pytest.fixture(scope="module")
def results(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All command lines through one process: importing SGLang takes long."""
    folder = tmp_path_factory.mktemp("flags")
    model = tiny_model()
    (folder / "taken").mkdir()
    (folder / "taken" / "typo.yaml").touch()
    settings = folder / "settings.yaml"
    settings.write_text("host_size: 2GB\ndisk_size: 7GB\nrestore_deadline_s: 8\n", encoding="utf-8")
    (folder / "server.yaml").write_text("hierarchical-cache: off\n", encoding="utf-8")
    (folder / "keys.yaml").write_text("api-key:\nadmin-api-key: yes\n", encoding="utf-8")
    (folder / "typo.yaml").write_text("hots_size: 2GB\n", encoding="utf-8")
    base = ["--model-path", str(model), *CPU]
    cases = {
        "off": base,
        "explicitly off": [*base, "--hierarchical-cache", "off"],
        "off in SGLang's file": [*base, "--config", str(folder / "server.yaml")],
        "off with our flags": [*base, "--hcache-host-size", "1GB", "--hcache-config", "x.yaml"],
        "off with the CPU fixes": [*base, "--hcache-cpu-fixes"],
        "CPU fixes and HiCache": [*base, "--hcache-cpu-fixes", "--hicache-storage-backend", "file"],
        "on": [*base, *ON],
        "flags": [*base, *ON, "--hcache-dirs", "/a,/b", "--hcache-host-size", "512MiB"],
        "file": [*base, *ON, "--hcache-config", str(settings), "--hcache-disk-size", "9GB"],
        "disk without a directory": [*base, *ON, "--hcache-disk-size", "9GB", "--hcache-io-engine", "posix"],
        "typo": [*base, *ON, "--hcache-config", str(folder / "typo.yaml")],
        "not ours, and do without": [
            *(*base, *ON, "--hcache-dirs", str(folder / "taken"), "--hcache-disk-at-start", "optional")
        ],
        "overlap": [*base[:-1], *ON],
        "windows in a plain pool": [
            *("--model-path", str(config_only(folder / "windows", WITH_WINDOWS)), *CPU, *ON),
            "--disable-hybrid-swa-memory",
        ],
        "never beyond the original context": [
            *("--model-path", str(config_only(folder / "longrope", WITH_LONGROPE)), *CPU, *ON),
            *("--context-length", "512"),
        ],
        "small": [*base, *ON, "--hcache-host-size", "100MB"],
        "large": [*base, *ON, "--hcache-host-size", "1GB"],
        "nothing is stored": [*base, *ON, "--hcache-method", "recompute", "--hcache-host-size", "900TB"],
        "large, and a share": [*base, *ON, "--hcache-host-size", "1GB", "--mem-fraction-static", "0.5"],
        "large, and tokens": [*base, *ON, "--hcache-host-size", "1GB", "--max-total-tokens", "1000"],
    }
    for name, refusal in REFUSALS.items():
        path = model if refusal.model is None else config_only(folder / name, refusal.model)
        given = [argument.replace("{folder}", str(folder / "taken")) for argument in refusal.arguments]
        cases[name] = [*refusal.environment, "--model-path", str(path), *CPU, *ON, *given]
    return parsed(cases)


def parsed(cases: dict[str, list[str]], packages: Path | None = None) -> dict[str, Any]:
    """What becomes of command lines, as the command ``env`` has them, in one process, which looks for ``packages``
    first.
    """
    _, environment = prepare_launch([])
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse_arguments.py"))],
        input=json.dumps(list(cases.values())),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    return dict(zip(cases, json.loads(lines[0].removeprefix("RESULTS ")), strict=True))


def config_only(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_a_reason(results: dict[str, Any], name: str) -> None:
    assert results[name]["exit"] == 2, results[name]
    message = results[name]["stderr"]
    assert "hcache: error: " in message
    assert "Traceback" not in message
    for part in REFUSALS[name].says:
        assert part in message


def test_another_release_of_sglang_is_refused_before_it_is_used(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As pip would find it installed. Without the tier any will do."""
    other = tmp_path / "sglang-0.5.18+cpu.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.18+cpu\n")
    base = ["--model-path", str(tiny_model()), *CPU]
    results = parsed({"off": base, "on": [*base, *ON], "fixes": [*base, "--hcache-cpu-fixes"]}, tmp_path)
    assert results["off"]["exit"] is None, results["off"]
    for name, flag in (("on", "--hierarchical-cache"), ("fixes", "--hcache-cpu-fixes")):
        message = results[name]["stderr"]
        assert results[name]["exit"] == 2, results[name]
        assert f"hcache: error: {flag}: SGLang 0.5.18+cpu is installed" in message
        assert 'pip install "sglang==0.5.17"' in message


def test_a_typo_in_the_file_is_refused(results: dict[str, Any]) -> None:
    assert results["typo"]["exit"] == 2
    assert "hots_size" in results["typo"]["stderr"]
    assert "host_size" in results["typo"]["stderr"]


def test_a_disk_tier_that_may_be_missing_does_not_end_the_start(results: dict[str, Any]) -> None:
    assert results["not ours, and do without"]["exit"] is None


def test_overlap_scheduling_is_accepted(results: dict[str, Any]) -> None:
    assert results["overlap"]["exit"] is None
    assert results["overlap"]["fields"]["radix_cache_backend"] == "hcache"


def test_windows_that_only_mask_attention_are_accepted(results: dict[str, Any]) -> None:
    assert results["windows in a plain pool"]["exit"] is None
    assert results["never beyond the original context"]["exit"] is None


@pytest.mark.parametrize("name", ["off", "explicitly off", "off in SGLang's file", "off with our flags"])
def test_without_the_flag_nothing_of_sglang_changes(results: dict[str, Any], name: str) -> None:
    assert results[name]["exit"] is None
    assert results[name]["fields"] == {
        "radix_cache_backend": None,
        "enable_hierarchical_cache": False,
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
    }
    assert results[name]["pool_share"] == results["off"]["pool_share"]


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        (
            "off with our flags",
            "hcache: --hcache-host-size, --hcache-config: ignored, because --hierarchical-cache is off",
        ),
        (
            "disk without a directory",
            "hcache: --hcache-disk-size, --hcache-io-engine: ignored, because --hcache-dirs names no directory",
        ),
    ],
)
def test_flags_that_do_nothing_are_named(results: dict[str, Any], name: str, warning: str) -> None:
    assert results[name]["exit"] is None
    assert warning in results[name]["stderr"]
    assert not any("ignored, because" in results[other]["stderr"] for other in ("off", "on", "flags"))


def test_the_cpu_fixes_alone_select_no_backend(results: dict[str, Any]) -> None:
    fields = results["off with the CPU fixes"]["fields"]
    assert json.loads(fields.pop("hicache_storage_backend_extra_config")) == {"hcache_cpu_fixes": True}
    assert not any(fields.values())
    # HiCache would take them for settings of its storage.
    refused = results["CPU fixes and HiCache"]
    assert refused["exit"] == 2
    assert "--hcache-cpu-fixes" in refused["stderr"]


def test_the_flag_selects_our_backend(results: dict[str, Any]) -> None:
    fields = results["on"]["fields"]
    assert fields["radix_cache_backend"] == "hcache"
    assert json.loads(fields["hicache_storage_backend_extra_config"])["dirs"] == []


def test_flags_reach_the_configuration_and_win_over_the_file(results: dict[str, Any]) -> None:
    flags = json.loads(results["flags"]["fields"]["hicache_storage_backend_extra_config"])
    assert (flags["dirs"], flags["host_size"]) == (["/a", "/b"], "512MiB")
    file = json.loads(results["file"]["fields"]["hicache_storage_backend_extra_config"])
    assert (file["host_size"], file["disk_size"], file["restore_deadline_s"]) == ("2GB", "9GB", 8)


def test_on_a_cpu_the_kv_pool_leaves_room_for_the_host_tier(results: dict[str, Any]) -> None:
    """The reason why SGLang's server did not start with its own settings and ours."""
    share = {name: results[name]["pool_share"] for name in results if "pool_share" in results[name]}
    assert (
        share["large"] <= share["small"] < share["off"]
    )  # in thousandths: of a large machine one is more than both
    assert share["large, and a share"] == 0.5
    assert share["large, and tokens"] == share["nothing is stored"] == share["off"]
