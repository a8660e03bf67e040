"""The folder of a model that has no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gpu.shapes import Shape


def write_model(folder: Path, shape: Shape) -> None:
    """What SGLang wants to see of a model with dummy weights: its configuration, and a tokenizer of all its tokens."""
    (folder / "config.json").write_text(json.dumps(shape.config))
    vocabulary = {"<unk>": 0, **{f"w{number}": number for number in range(1, shape.config["vocab_size"])}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
