"""Rotary embeddings that turn a token by what else is in its pass: its K is then no state of its prefix."""

from __future__ import annotations

from typing import Any


def rotation_problem(model_config: Any, *, follows_passes: bool) -> str | None:
    """Why K of SGLang's ``ModelConfig`` cannot be kept; None: it can.

    ``longrope`` turns all rows of a pass, of all its requests, by other factors once one of them is beyond the context
    that the model was first trained with. ``dynamic`` is fixed at start in most of SGLang's own models, and depends on
    the longest pass so far in Hugging Face's, and in those whose code SGLang took from there, as Gemma 3.

    Args:
        follows_passes: whether the model is one of the latter.
    """
    config = model_config.hf_text_config
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Some name one for each kind of layer.
    for scaling in (given, *(each for each in given.values() if isinstance(each, dict))):
        name = scaling.get("rope_type", scaling.get("type"))
        if name != "longrope" and not (name == "dynamic" and follows_passes):
            continue
        name_of_original = "original_max_position_embeddings"
        given_original = getattr(config, name_of_original, None) or scaling.get(name_of_original)
        original = given_original or config.max_position_embeddings
        if model_config.context_len > original:
            return (
                f"{name} rotation beyond {original} tokens, where a token's K depends on what else is in its pass; "
                f"--context-length {original} does without"
            )
    return None
