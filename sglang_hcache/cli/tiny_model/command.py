"""``hcache tiny-model``: write a small random model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_hcache.cli.paths import named_path
from sglang_hcache.cli.signals import ended_by_interrupts
from sglang_hcache.cli.tiny_model.model import TinyModel


def tiny_model(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", parser=named_path, help="New or empty folder for the model.")
    ],
    seed: Annotated[
        int, typer.Option(help="The same seed gives the same weights.", min=0, max=2**63 - 1)
    ] = 0,
) -> None:
    """Write a small random Llama model with a tokenizer, without a download."""
    with ended_by_interrupts():
        from sglang_hcache.cli.tiny_model.write import write_tiny_model  # torch and transformers take seconds

    write_tiny_model(folder, TinyModel(seed=seed))
    print(f"wrote {folder}")
