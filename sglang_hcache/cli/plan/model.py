"""The model that ``hcache plan`` plans for, and how it is served."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from sglang_hcache.cli.paths import given_path
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.shapes import DTYPE_BYTES, FP8_CACHES, NAMED_SHAPES, ModelShape

NAMES = ", ".join(NAMED_SHAPES)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Its sizes, and what a server of it leaves out."""

    shape: ModelShape
    why_not_hidden: str | None
    """Why no hidden states are stored; None: they may be."""

    @classmethod
    def of(cls, model: str, dtype: str, kv_cache_dtype: str) -> PlannedModel:
        """The values of MODEL, ``--dtype`` and ``--kv-cache-dtype``.

        A name wins over a folder of that name, but not written in another way, such as Llama-2-7B.

        Raises:
            ConfigError: not a name, and no readable configuration of a model that we know; or a wrong dtype.
        """
        _check("--dtype", dtype, ("", *DTYPE_BYTES))
        _check("--kv-cache-dtype", kv_cache_dtype, ("auto", *FP8_CACHES))
        why_not_hidden = None
        if (named := _named(model)) is not None:
            shape = named.with_dtype(dtype) if dtype else named
        else:
            shape, is_quantised = _read(model, dtype)
            why_not_hidden = "weights are quantised" if is_quantised else None
        if kv_cache_dtype != "auto":
            shape, why_not_hidden = shape.with_fp8_cache(), f"K and V are {kv_cache_dtype}"
        return cls(shape, why_not_hidden)


def _check(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag}: {value!r} is not allowed; allowed: {', '.join(filter(None, allowed))}")


def _named(model: str) -> ModelShape | None:
    if model in NAMED_SHAPES:
        return NAMED_SHAPES[model]
    shape = next((shape for name, shape in NAMED_SHAPES.items() if _parts(name) == _parts(model)), None)
    return None if shape is None or given_path("MODEL", model).exists() else shape


def _parts(name: str) -> list[str]:
    """Words and numbers: Llama-2-7B has those of llama2-7b, llama-27b and llama-2.7b have others."""
    return re.findall(r"[a-z]+|[0-9]+(?:\.[0-9]+)?|[^-_.]", name.lower())


def _read(model: str, dtype: str) -> tuple[ModelShape, bool]:
    """Sizes in a folder or file, and whether the weights there are quantised."""
    path = file = given_path("MODEL", model)
    try:
        if not path.exists():
            raise ConfigError(f"MODEL: {model!r} is no folder and no file, and not one of {NAMES}")
        if path.is_dir():
            file = path / "config.json"
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it must hold a JSON object")
        shape = ModelShape.from_config(config, path.name, dtype or None)
    except OSError as error:
        raise ConfigError(f"MODEL: cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"MODEL: {file}: {error}") from None
    except RecursionError:
        raise ConfigError(f"MODEL: {file}: it is nested too deeply") from None
    return shape, bool(config.get("quantization_config"))
