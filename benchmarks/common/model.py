"""The model that a benchmark serves: the user's, or a random one that is written for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from common.precision import precision
from sglang_hcache.cli.paths import given_path
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.cli.tiny_model.write import write_tiny_model
from sglang_hcache.core.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class BenchModel:
    """A model folder, opened."""

    path: Path
    header: dict[str, Any]
    """For the results: name, sizes, dtype."""
    tokenizer: Tokenizer
    max_position: int
    kv_token_bytes: int
    """K and V of one token, all layers."""

    @classmethod
    def open(cls, path: Path, *, name: str) -> BenchModel:
        """Read ``config.json`` and ``tokenizer.json`` of ``path``.

        Raises:
            ConfigError: one is missing or is not what it should be.
        """
        try:
            config = json.loads((path / "config.json").read_text())
            layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            hidden, max_position = int(config["hidden_size"]), int(config["max_position_embeddings"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            architecture = str((config.get("architectures") or ["unknown"])[0])
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except OSError as error:
            raise ConfigError(f"--model-path: cannot read {error.filename}: {error.strerror}") from None
        except Exception as error:  # the tokenizers library raises Exception itself
            raise ConfigError(f"--model-path: {path}: {error!r}") from None
        kind = precision()
        header = {
            "name": name,
            "architecture": architecture,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "dtype": kind.dtype,
            "vocab": tokenizer.get_vocab_size(),
            **({} if has_weights(path) else {"weights": "dummy"}),
        }
        return cls(path, header, tokenizer, max_position, 2 * layers * kv_heads * head_dim * kind.value_bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` alone: no begin or end of sequence."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def random_prompt(self, random: np.random.Generator, length: int) -> list[int]:
        """``length`` ordinary tokens."""
        return random.choice(self.ordinary_tokens, size=length).tolist()  # type: ignore[no-any-return]

    @cached_property
    def ordinary_tokens(self) -> np.ndarray:
        """Ids of all tokens that have no special meaning, int64, ascending."""
        special = set(self.tokenizer.get_added_tokens_decoder())
        return np.array(sorted(set(self.tokenizer.get_vocab().values()) - special), dtype=np.int64)


def has_weights(path: Path) -> bool:
    """Whether the model folder has a file that may be of weights."""
    return any(file.suffix in _WEIGHTS for file in path.iterdir())


def load_arguments(path: Path) -> list[str]:
    """Of a server of the model folder: where it has no weights, SGLang's own, which are the same at each start."""
    return [] if has_weights(path) else ["--load-format", "dummy"]


def prepare_model(
    folder: Path,
    model_path: Path | None,
    tiny: TinyModel,
    texts: Iterable[str] | None = None,
    *,
    device: str = "cpu",
) -> BenchModel:
    """Open ``model_path``; without it write ``tiny`` into ``folder``.

    Args:
        texts: what the random model's tokenizer learns from; None: a built-in text.
        device: that draws the random model's weights.

    Raises:
        ConfigError: it cannot be read, or written.
    """
    if model_path is not None:
        path = given_path("--model-path", model_path)
        return BenchModel.open(path, name=path.name)
    path = folder / "model"
    write_tiny_model(path, tiny, texts, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()  # for those who serve the model
    return BenchModel.open(path, name="random")
