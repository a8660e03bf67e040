"""With what SGLang computes K and V, beside the model's own code and weights."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

_APPROXIMATIONS = (
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
)
"""Variables of the environment: attention leaves out what counts for little."""


def quantization_of(model_config: Any, torchao_config: str | None) -> str | None:
    """How the weights of SGLang's model are quantised, in the checkpoint or when it is loaded; None: they are not."""
    return model_config.quantization or (f"torchao {torchao_config}" if torchao_config else None)


def computation_of(server_args: Any, *, has_amx: bool) -> str:
    """With what SGLang computes K and V: chunks on disk may be of a server that was started with something else.

    For some models that changes more than rounding: ``torch_native`` leaves out the soft cap of Gemma 2's scores,
    Gemma 3 rotates by other code on a CPU with AMX, and fused q/k norm and rotation scale YaRN otherwise. Where SGLang
    promises always the same bits, what else those depend on counts as well.

    Args:
        has_amx: whether SGLang's kernels for AMX are in use.
    """
    prefill, decode = server_args.get_attention_backends()
    text = f"{server_args.device} {prefill} {decode}"
    if has_amx:
        text += " amx"
    if server_args.enable_fused_qk_norm_rope:
        text += " fused q/k norm and rotation"
    if server_args.enable_deterministic_inference:
        adapters = f" lora {server_args.lora_backend}" if server_args.enable_lora else ""
        text += f" deterministic {server_args.rl_on_policy_target}{adapters}"
    for name in _APPROXIMATIONS:
        if (factor := getattr(envs, name).get()) is not None:
            text += f" {name} {factor}"
    return text
