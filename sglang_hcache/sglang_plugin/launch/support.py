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
    pass_rows_of,
    staged_passes_of,
    store_config,
)
from sglang_hcache.sglang_plugin.seam.computation import quantization_of
from sglang_hcache.sglang_plugin.seam.gpu import chooses_hidden
from sglang_hcache.sglang_plugin.seam.model import ROUNDED, shape_of, why_not_hidden
from sglang_hcache.sglang_plugin.seam.named_profile import named_profile
from sglang_hcache.sglang_plugin.seam.rotation import rotation_problem

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

_ENDS_AT_ONCE = "told to stop, that server ends before the tier has saved what is in memory only"
_OTHER_POOL = "K and V of a token are not where the tier looks for them"
_OTHER_WEIGHTS = "weights are not where the projector looks for them"
_MADE_UP = "K and V of experts that no router chose would be stored, and serve real requests later"
_REFUSED = {
    # Other caches.
    "radix_cache_backend": "the tier is a radix cache backend itself",
    "enable_hierarchical_cache": "SGLang's HiCache takes the same place",
    "disable_radix_cache": "the tier keeps what the radix cache evicts",
    "enable_lmcache": "LMCache takes the same place",
    "enable_flexkv": "FlexKV takes the same place",
    "enable_session_radix_cache": "it needs a tree of its own",
    # Servers without SGLang's TokenizerManager, or without plugins.
    "SGLANG_RUST_SERVER": _ENDS_AT_ONCE,
    "smg_grpc_mode": _ENDS_AT_ONCE,
    "grpc_mode": _ENDS_AT_ONCE,
    "use_ray": "its actors load no plugins",
    # What keeps K and V in pools that the tier does not know.
    "SGLANG_USE_HND_KVCACHE": _OTHER_POOL,
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (
        "SGLang leaves less memory for passes then, counting on CUDA graphs that the tier leaves out"
    ),
    "enable_page_major_kv_layout": _OTHER_POOL,
    "enable_unified_memory": _OTHER_POOL,
    "enable_hisparse": "it needs a server without a radix cache",
    "enable_int8_mamba_checkpoint": "it is for Mamba models, whose state is not that of single tokens",
    "SGLANG_RADIX_FORCE_MISS": "SGLang uses nothing of what is restored then",
    "kv_canary": "it takes restored K and V for corruption",
    # What changes weights or passes in ways that the tier does not know.
    "speculative_algorithm": "passes that verify are not captured, and a draft model's KV is not restored",
    "enable_lora_overlap_loading": (
        "it loads adapters for requests that wait for their restore, in the place of those that could run"
    ),
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": _MADE_UP,
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": _MADE_UP,
    "cpu_offload_gb": _OTHER_WEIGHTS,
    "offload_group_size": _OTHER_WEIGHTS,
    "kt_weight_path": "those weights are not in the fingerprint",
    "enable_torch_compile": "compiled layers do not show their hidden states",
    "enable_two_batch_overlap": "layers compute a pass in two halves there",
    "dllm_algorithm": "diffusion models do not fill their KV in order",
    "enable_pdmux": "prefill and decode run beside each other there",
    "forward_hooks": "stored hidden states do not say what a hook changed",
    "enable_priority_scheduling": (
        "preempting for a request that waits for its restore loses the preempted ones in SGLang 0.5.17; "
        "add --disable-priority-preemption"
    ),
    "enable_return_routed_experts": "nobody knows which experts restored tokens went to",
    "enable_mis": "items of one prompt do not see each other there",
    "disaggregation_mode": "prefill and decode share no tier yet",
}
"""Arguments, and variables of the environment (in capitals) -> why they are refused."""
_NO_KEYS = ("", "None", "True", "true", "False", "false")


def check_arguments(args: argparse.Namespace, defaults: type) -> None:
    """Refuse arguments that SGLang itself would reject or change before we could explain.

    Args:
        defaults: ``ServerArgs``.

    Raises:
        ConfigError: one line per refusal.
    """
    problems = [
        f"{_FLAG} cannot be used with {_shown(name)}: {reason}"
        for name, reason in _REFUSED.items()
        if _is_given(args, name)
    ]
    if args.kv_cache_dtype not in (*_AS_COMPUTED, *_BFLOAT16, *ROUNDED):
        problems.append(
            f"{_FLAG} cannot be used with --kv-cache-dtype {args.kv_cache_dtype}: a token's K and V are more than "
            "its values there; use auto, fp8_e4m3 or fp8_e5m2"
        )
    _raise([*problems, *_hicache(args, defaults), *_parallelism(args), *_keys(args)])


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
    stored = config.method if why_only_kv is None else PlanKind.KV
    limit_sizes(prefill, shape, largest_pass_of(server_args), stores_hidden=chooses_hidden(stored, shape))
    # A quantised checkpoint may ask for an FP8 cache by itself: how wide K and V are is known when it is loaded.
    if config.profile is not None and (quantization is None or kv_dtype is not None):
        named_profile(config.profile, shape)
    _check_sizes(server_args, config, shape, stored)


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
        passes, rows = staged_passes_of(server_args), pass_rows_of(server_args)
        HostBudget.of(share, layout, pass_rows=rows, staged_passes=passes, num_ranks=num_ranks)


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


def _is_given(args: argparse.Namespace, name: str) -> bool:
    """Whether a row of :data:`_REFUSED` is asked for."""
    if name.isupper():
        return bool(getattr(envs, name).get())
    value = getattr(args, name)
    match name:
        case "kv_canary":
            return value not in (None, "none")
        case "disaggregation_mode":
            return value not in (None, "null")
        case "offload_group_size":
            return bool(value > 0)
        case "enable_priority_scheduling":
            return bool(value and not args.disable_priority_preemption)
        case _:
            return bool(value)


def _shown(name: str) -> str:
    return f"{name} in the environment" if name.isupper() else _flag(name)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _hicache(args: argparse.Namespace, defaults: type) -> list[str]:
    """Settings of SGLang's HiCache, which would say nothing."""
    return [
        f"{_FLAG} cannot be used with {_flag(field)} {value}: "
        + _IN_PLACE_OF_HICACHE.get(field, "it sets SGLang's HiCache, in whose place the tier is")
        for field, value in vars(args).items()
        if field.startswith(_HICACHE) and value != getattr(defaults, field, None)
    ]


def _parallelism(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.tp_size is not None and args.tp_size < 1:
        problems.append(f"--tp-size {args.tp_size} is not allowed; give at least 1")
    for field in ("nnodes", "pp_size", "dp_size", "dwdp_size", "attn_cp_size", "dcp_size"):
        size = getattr(args, field)
        if size not in (None, 1):
            problems.append(
                f"{_FLAG} supports {_flag(field)} 1 only, got {size}: only the ranks of --tp-size, on one machine, "
                "agree on restores"
            )
    return problems


def _keys(args: argparse.Namespace) -> list[str]:
    """Keys that nobody would check or that anyone can guess: whoever reaches the server could empty the tiers."""
    given = [(_flag(field), getattr(args, field)) for field in ("api_key", "admin_api_key")]
    problems = [
        f"{flag}: {value!r} is no key, but what SGLang makes of an empty value, or of yes or no, in its file; "
        f'write it in quotes there: {flag[2:]}: "KEY"'
        for flag, value in given
        if value in _NO_KEYS
    ]
    if args.tokenizer_worker_num not in (None, 1):
        problems += [
            f"{flag} cannot be used with --tokenizer-worker-num {args.tokenizer_worker_num}: SGLang checks no key "
            "there, so everyone could empty the cache and the tiers"
            for flag, value in given
            if value
        ]
    return problems


def _model(model: Any) -> list[str]:
    arch = ", ".join(model.hf_config.architectures or ["unknown"])
    # Whether SGLang falls back to that backend, or has code of that kind, is known when the model is loaded.
    rotation = rotation_problem(model, follows_passes=model.model_impl == "transformers")
    found = [
        (model.attention_arch.name != "MHA", f"attention kind {model.attention_arch.name}"),
        (
            model.is_hybrid_swa,
            "layers that keep a sliding window only; --disable-hybrid-swa-memory keeps K and V of all tokens",
        ),
        (model.is_encoder_decoder, "an encoder"),
        (model.is_multimodal, "multimodal input"),
        (not model.is_generation, "no text generation"),
        (rotation is not None, rotation),
    ]
    return [f"{_FLAG} does not support {arch}: {what}" for is_found, what in found if is_found]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
