"""``hcache tiny-model``: write a small random model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_hcache.cli.paths import named_path
from sglang_hcache.cli.tiny_model.model import FAMILIES, TinyModel

_USUAL = TinyModel()


def tiny_model(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=named_path, help="New or empty folder for the model.")
    ],
    family: Annotated[str, typer.Option(help=f"{', '.join(FAMILIES)}.")] = _USUAL.family,
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = _USUAL.layers,
    hidden: Annotated[int, typer.Option(help="Hidden size.", min=1)] = _USUAL.hidden,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = _USUAL.heads,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads; as many as heads if not given.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = _USUAL.vocab,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = _USUAL.dtype,
    max_position: Annotated[int, typer.Option(help="Longest context, tokens.", min=1)] = _USUAL.max_position,
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = _USUAL.seed,
) -> None:
    """Write a small random model with a tokenizer, without any download."""
    model = TinyModel(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        dtype=dtype,
        max_position=max_position,
        seed=seed,
    )
    from sglang_hcache.cli.tiny_model.write import write_tiny_model  # torch and transformers take seconds

    write_tiny_model(folder, model)
    print(f"wrote {folder}")
