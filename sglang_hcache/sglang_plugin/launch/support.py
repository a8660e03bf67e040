"""What the tier does not support yet, refused at start with the reason: never a wrong token."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sglang.srt.environ import envs

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind, StateLayout
from sglang_hcache.device.memory import tell_limits
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.sglang_plugin.launch.prefill_graphs import limit_sizes
from sglang_hcache.sglang_plugin.seam.budget import (
    HostBudget,
    largest_pass_of,
    staged_passes_of,
    store_config,
)
from sglang_hcache.sglang_plugin.seam.model import ROUNDED, quantization_of, shape_of, why_not_hidden
from sglang_hcache.sglang_plugin.seam.named_profile import named_profile

_FLAG = "--hierarchical-cache hcache"
_AS_COMPUTED = (None, "auto")
_BFLOAT16 = ("bf16", "bfloat16")
_HICACHE = "hicache_"
_IN_PLACE_OF_HICACHE = {
    "hicache_size": "use --hcache-host-size",
    "hicache_ratio": "use --hcache-host-size",
    "hicache_write_policy": "use --hcache-write-policy",
    "hicache_storage_backend": "use --hcache-dirs for the disk tier",
    "hicache_storage_backend_extra_config": "use --hcache-dirs for the disk tier, and --hcache-config",
}
"""What the tier has instead; of the rest nothing."""


def check_arguments(args: argparse.Namespace, defaults: type) -> None:
    """Refuse arguments that SGLang itself would reject or change before we could explain.

    Args:
        defaults: ``ServerArgs``.

    Raises:
        ConfigError: one line per refusal.
    """
    problems = [
        f"{_FLAG} cannot be used with {flag}: {reason}"
        for given, flag, reason in [
            *_in_its_place(args),
            *_other_servers(args),
            *_unknown_pools(args),
            *_unknown_passes(args),
        ]
        if given
    ]
    if args.disaggregation_mode not in (None, "null"):
        problems.append(
            f"{_FLAG} cannot be used with --disaggregation-mode: prefill and decode share no tier yet"
        )
    if args.kv_cache_dtype not in (*_AS_COMPUTED, *_BFLOAT16, *ROUNDED):
        problems.append(
            f"{_FLAG} cannot be used with --kv-cache-dtype {args.kv_cache_dtype}: a token's K and V are more than "
            "its values there; use auto, fp8_e4m3 or fp8_e5m2"
        )
    _raise([*problems, *_hicache(args, defaults), *_parallelism(args)])


def check_server_args(server_args: Any, config: HCacheConfig) -> None:
    """Refuse resolved settings and models that the tier does not support; limit CUDA graphs for prefill.

    Raises:
        ConfigError: one line per refusal; sizes that do not fit this model or machine.
    """
    model = server_args.get_model_config()
    problems = _model(model)
    if CHUNK_TOKENS % server_args.page_size:
        problems.append(
            f"{_FLAG} needs a --page-size that divides {CHUNK_TOKENS}, got {server_args.page_size}"
        )
    prefill = server_args.cuda_graph_config.prefill
    problems += device_problems(str(server_args.device), str(prefill.backend))
    if server_args.disable_radix_cache:
        problems.append(without_radix_cache(is_deterministic=False))
    if server_args.enable_deterministic_inference:
        problems += determinism_problems(config.method)
    if getattr(server_args, "enable_streaming_session", False):
        problems.append(
            f"{_FLAG} cannot be used with --enable-streaming-session: sessions bypass the radix cache"
        )
    if server_args.kv_cache_dtype in _BFLOAT16 and model.dtype is not torch.bfloat16:
        problems.append(
            f"{_FLAG} cannot be used with --kv-cache-dtype {server_args.kv_cache_dtype} and a model in {model.dtype}: "
            "K and V that are restored would be rounded differently; use auto"
        )
    quantization, num_ranks = quantization_of(model, server_args.torchao_config), server_args.tp_size
    kv_dtype = ROUNDED.get(server_args.kv_cache_dtype)
    why_only_kv = why_not_hidden(kv_dtype, quantization, _has_adapters(server_args), num_ranks)
    if config.method is PlanKind.HIDDEN and why_only_kv is not None:
        problems.append(
            f"--hcache-method hidden cannot be used: {why_only_kv}; use auto or kv, which keep K and V as they are"
        )
    if num_ranks > 1:
        problems += _without_ranks(server_args)
    _raise(problems)
    shape = shape_of(model, kv_dtype, num_ranks)
    limit_sizes(prefill, shape, largest_pass_of(server_args))
    # A quantised checkpoint may ask for an FP8 cache by itself: how wide K and V are is known when it is loaded.
    if config.profile is not None and (quantization is None or kv_dtype is not None):
        named_profile(config.profile, shape)
    _check_sizes(server_args, config, shape, config.method if why_only_kv is None else PlanKind.KV)


def _check_sizes(server_args: Any, config: HCacheConfig, shape: ModelShape, stored: PlanKind) -> None:
    """Whether directories and sizes will do for each rank, of which ``shape`` is. Raises ConfigError."""
    num_ranks = server_args.tp_size
    share = config.of_rank(0, num_ranks)
    try:
        store_config(share)
    except ConfigError as error:
        whose = "" if num_ranks == 1 else f"; that is for each of the {num_ranks} ranks"
        raise ConfigError(f"{error}{whose}") from None
    sizes = {PlanKind.HIDDEN: shape.hidden_row_bytes, PlanKind.KV: shape.kv_row_bytes}
    row_bytes = sizes.get(stored, min(sizes.values()))
    layout = StateLayout.of((Method.HIDDEN,) * shape.num_layers, row_bytes, row_bytes)
    if config.method is not PlanKind.RECOMPUTE:  # which holds nothing
        tell_limits()
        passes, largest_pass = staged_passes_of(server_args), largest_pass_of(server_args)
        HostBudget.of(share, layout, largest_pass=largest_pass, staged_passes=passes, num_ranks=num_ranks)


def _without_ranks(server_args: Any) -> list[str]:
    """What cannot be used where several ranks have to agree."""
    timeouts = {
        name: getattr(envs, name).get()
        for name in ("SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT")
    }
    given = [
        *(
            (seconds > 0, name, "each rank would end a request by its own clock")
            for name, seconds in timeouts.items()
        ),
        (
            server_args.lora_drain_wait_threshold > 0,
            "--lora-drain-wait-threshold",
            "each rank would drain adapters by its own clock",
        ),
        (
            server_args.enable_prefill_delayer and server_args.prefill_delayer_queue_min_ratio is not None,
            "--prefill-delayer-queue-min-ratio",
            "each rank would delay a prefill by its own clock",
        ),
        (server_args.enable_eplb, "--enable-eplb", "it moves the weights that a rank has"),
        (server_args.elastic_ep_backend, "--elastic-ep-backend", "ranks that come and go cannot agree"),
    ]
    ranks = f"--tp-size {server_args.tp_size}"
    return [
        f"{_FLAG} cannot be used with {ranks} and {what}: {why}" for is_given, what, why in given if is_given
    ]


def _has_adapters(server_args: Any) -> bool:
    """Whether SGLang will serve LoRA adapters: it draws that from ``--lora-paths`` after we are asked."""
    return bool(server_args.enable_lora or (server_args.enable_lora is None and server_args.lora_paths))


def without_radix_cache(is_deterministic: bool) -> str:
    """Why SGLang serves without a radix cache, although nobody has asked it to."""
    if not is_deterministic:
        return f"{_FLAG} does not support this model: SGLang serves it without a radix cache"
    from sglang.srt.server_args import RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND

    backends = ", ".join(RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND)
    return (
        f"{_FLAG} cannot be used with --enable-deterministic-inference and this attention backend: SGLang serves "
        f"without a radix cache then; choose one with --attention-backend: {backends}"
    )


def without_hicache(refusal: str) -> str:
    """What SGLang says against HiCache, in whose place the tier is, in one line."""
    return (
        f"{_FLAG} does not support this model or one of the flags: SGLang refuses it with a hierarchical cache, and "
        f"says of its own: {' '.join(refusal.split())}"
    )


def device_problems(device: str, prefill_graphs: str) -> list[str]:
    """Why the tier does not run on ``device``.

    Args:
        prefill_graphs: SGLang's backend of CUDA graphs for prefill.
    """
    if device not in ("cpu", "cuda"):
        return [f"{_FLAG} runs with --device cpu and cuda, not {device!r}"]
    if device == "cpu" or prefill_graphs in ("disabled", "breakable"):
        return []
    return [
        f"{_FLAG} cannot be used with --cuda-graph-backend-prefill {prefill_graphs}: hidden states are not seen in "
        "its layers; use breakable, or leave it out"
    ]


def determinism_problems(method: PlanKind) -> list[str]:
    """Why ``method`` does not keep what ``--enable-deterministic-inference`` promises."""
    if method in (PlanKind.KV, PlanKind.RECOMPUTE):
        return []
    return [
        f"{_FLAG} cannot be used with --enable-deterministic-inference: K and V that are projected again may differ "
        "in their last bits from those of a prefill; add --hcache-method kv, which keeps the bits"
    ]


def _in_its_place(args: argparse.Namespace) -> list[tuple[object, str, str]]:
    """Other caches: whether each is asked for, its flag, and why not."""
    return [
        (args.radix_cache_backend, "--radix-cache-backend", "the tier is a radix cache backend itself"),
        (
            args.enable_hierarchical_cache,
            "--enable-hierarchical-cache",
            "SGLang's HiCache takes the same place",
        ),
        (args.disable_radix_cache, "--disable-radix-cache", "the tier keeps what the radix cache evicts"),
        (args.enable_lmcache, "--enable-lmcache", "LMCache takes the same place"),
        (args.enable_flexkv, "--enable-flexkv", "FlexKV takes the same place"),
        (args.enable_session_radix_cache, "--enable-session-radix-cache", "it needs a tree of its own"),
    ]


def _other_servers(args: argparse.Namespace) -> list[tuple[object, str, str]]:
    """Servers without SGLang's ``TokenizerManager``, or without plugins; as :func:`_in_its_place`."""
    ends_at_once = "told to stop, that server ends before the tier has saved what is in memory only"
    return [
        (envs.SGLANG_RUST_SERVER.get(), "SGLANG_RUST_SERVER in the environment", ends_at_once),
        (args.smg_grpc_mode, "--smg-grpc-mode", ends_at_once),
        (args.grpc_mode, "--grpc-mode", ends_at_once),
        (args.use_ray, "--use-ray", "its actors load no plugins"),
    ]


def _unknown_pools(args: argparse.Namespace) -> list[tuple[object, str, str]]:
    """What keeps KV in pools that the tier does not know; as :func:`_in_its_place`."""
    elsewhere = "K and V of a token are not where the tier looks for them"
    return [
        (envs.SGLANG_USE_HND_KVCACHE.get(), "SGLANG_USE_HND_KVCACHE in the environment", elsewhere),
        (
            envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING in the environment",
            "SGLang leaves less memory for passes then, counting on CUDA graphs that the tier leaves out",
        ),
        (args.enable_page_major_kv_layout, "--enable-page-major-kv-layout", elsewhere),
        (args.enable_unified_memory, "--enable-unified-memory", elsewhere),
        (args.enable_hisparse, "--enable-hisparse", "it needs a server without a radix cache"),
        (
            args.enable_int8_mamba_checkpoint,
            "--enable-int8-mamba-checkpoint",
            "it is for Mamba models, whose state is not that of single tokens",
        ),
        (args.kv_canary not in (None, "none"), "--kv-canary", "it takes restored K and V for corruption"),
    ]


def _unknown_passes(args: argparse.Namespace) -> list[tuple[object, str, str]]:
    """What changes weights or passes in ways that the tier does not know; as :func:`_in_its_place`."""
    return [
        (
            args.speculative_algorithm,
            "--speculative-algorithm",
            "passes that verify are not captured, and a draft model's KV is not restored",
        ),
        (
            args.enable_lora_overlap_loading,
            "--enable-lora-overlap-loading",
            "it loads adapters for requests that wait for their restore, in the place of those that could run",
        ),
        (args.cpu_offload_gb, "--cpu-offload-gb", "weights are not where the projector looks for them"),
        (
            args.offload_group_size > 0,
            "--offload-group-size",
            "weights are not where the projector looks for them",
        ),
        (
            args.kt_weight_path,
            "--kt-weight-path",
            "those weights are not in the fingerprint",
        ),
        (
            args.enable_torch_compile,
            "--enable-torch-compile",
            "compiled layers do not show their hidden states",
        ),
        (
            args.enable_two_batch_overlap,
            "--enable-two-batch-overlap",
            "layers compute a pass in two halves there",
        ),
        (args.dllm_algorithm, "--dllm-algorithm", "diffusion models do not fill their KV in order"),
        (args.enable_pdmux, "--enable-pdmux", "prefill and decode run beside each other there"),
        (args.forward_hooks, "--forward-hooks", "stored hidden states do not say what a hook changed"),
        (
            args.enable_priority_scheduling and not args.disable_priority_preemption,
            "--enable-priority-scheduling",
            "preempting for a request that waits for its restore loses the preempted ones in SGLang 0.5.17; "
            "add --disable-priority-preemption",
        ),
        (
            args.enable_return_routed_experts,
            "--enable-return-routed-experts",
            "nobody knows which experts restored tokens went to",
        ),
        (args.enable_mis, "--enable-mis", "items of one prompt do not see each other there"),
    ]


def _hicache(args: argparse.Namespace, defaults: type) -> list[str]:
    """Settings of SGLang's HiCache, which would say nothing."""
    return [
        f"{_FLAG} cannot be used with --{field.replace('_', '-')} {value}: "
        + _IN_PLACE_OF_HICACHE.get(field, "it sets SGLang's HiCache, in whose place the tier is")
        for field, value in vars(args).items()
        if field.startswith(_HICACHE) and value != getattr(defaults, field, None)
    ]


def _parallelism(args: argparse.Namespace) -> list[str]:
    too_few = args.tp_size is not None and args.tp_size < 1
    return [
        *([f"--tp-size {args.tp_size} is not allowed; give at least 1"] if too_few else []),
        *_more_processes(args),
    ]


def _more_processes(args: argparse.Namespace) -> list[str]:
    return [
        f"{_FLAG} supports {flag} 1 only, got {size}: only the ranks of --tp-size, on one machine, agree on restores"
        for flag, size in (
            ("--nnodes", args.nnodes),
            ("--pp-size", args.pp_size),
            ("--dp-size", args.dp_size),
            ("--dwdp-size", args.dwdp_size),
            ("--attn-cp-size", args.attn_cp_size),
            ("--dcp-size", args.dcp_size),
        )
        if size not in (None, 1)
    ]


def _model(model: Any) -> list[str]:
    arch = ", ".join(model.hf_config.architectures or ["unknown"])
    found = [
        (model.attention_arch.name != "MHA", f"attention kind {model.attention_arch.name}"),
        (
            model.is_hybrid_swa,
            "layers that keep a sliding window only; --disable-hybrid-swa-memory keeps K and V of all tokens",
        ),
        (model.is_encoder_decoder, "an encoder"),
        (model.is_multimodal, "multimodal input"),
        (not model.is_generation, "no text generation"),
    ]
    return [f"{_FLAG} does not support {arch}: {what}" for is_found, what in found if is_found]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
