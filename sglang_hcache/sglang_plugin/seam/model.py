"""What the tier needs to know of the served model."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import Method, StateLayout
from sglang_hcache.device.attention import Attention, describe
from sglang_hcache.device.fingerprint import parts_fingerprint, weights_fingerprint
from sglang_hcache.device.generic import HIDDEN_STATES, GenericProjector
from sglang_hcache.device.projector import DescribedProjector, Projector
from sglang_hcache.plan.shapes import FP8_CACHES, FFNKind, ModelShape, printable
from sglang_hcache.sglang_plugin.seam.ranks import Alone, Ranks
from sglang_hcache.sglang_plugin.seam.rotation import rotation_problem

logger = logging.getLogger(__name__)

_ATTENTION = "RadixAttention"
"""SGLang's class that takes Q, K and V of a layer, writes K and V into the pool and attends."""
_LOOSE = "attention_instances"
"""Attribute of a model of SGLang's Transformers backend: layer -> attention. They are in no module's tree."""
_BASE = "base_layer"
"""Attribute of a module that LoRA adapters may change: the module without them."""
_DECODER = "decoder"
"""Its ``attn_type`` where a token sees those before it, and no others."""
_FOLLOWS_PASSES = "_dynamic_frequency_update"
"""Of Hugging Face's rotary embeddings, which some of SGLang's models have copied."""

ROUNDED: dict[str, torch.dtype] = {flag: getattr(torch, name) for flag, name in FP8_CACHES.items()}
"""``--kv-cache-dtype`` -> what it rounds K and V to."""

OnLayer = Callable[[int, torch.Tensor], None]
"""Receives a layer's index and the input of its attention, (rows, hidden_size)."""


def why_not_hidden(
    rounded_to: torch.dtype | None, quantization: str | None, has_adapters: bool, num_ranks: int
) -> str | None:
    """Why K and V are not projected from hidden states, without a look at the attention; None: they may be.

    Args:
        rounded_to: what K and V are rounded to in the pool, if they are.
        quantization: how weights are quantised, if they are.
    """
    if rounded_to is not None:
        return (
            f"K and V are rounded to {rounded_to} (--kv-cache-dtype), and what is projected again may be rounded to a "
            "neighbour"
        )
    if quantization is not None:
        return f"weights are quantised ({quantization}), and products with them may depend on the whole pass"
    if has_adapters:
        return "LoRA adapters (--enable-lora) change what K and V are projected with"
    if num_ranks > 1:
        return f"each of the {num_ranks} ranks (--tp-size) would have to keep them whole, for its part of K and V"
    return None


@dataclass(frozen=True)
class ServedModel:
    """A loaded decoder whose layers keep K and V in a plain pool."""

    module: nn.Module
    attention: tuple[Attention, ...]
    """Each layer's, in order; empty where a layer has none, or several."""
    architecture: str
    shape: ModelShape
    """Sizes of what this rank holds: its part of the heads of K and V."""
    dtype: torch.dtype
    """Element type of hidden states."""
    kv_dtype: torch.dtype
    """Element type of K and V in the pool."""
    context_length: int
    """Most tokens of a sequence."""
    vocabulary: int
    """Number of tokens that it knows."""
    config: str
    """The model's configuration, canonical JSON, without names and paths."""
    quantization: str | None = None
    """How its weights are quantised, as :func:`quantization_of` returns it."""
    computed_by: str = ""
    """With what K and V are computed, as :func:`computation_of` returns it."""
    has_adapters: bool = False
    """Whether the weights of a request may be changed by a LoRA adapter of its own."""
    ranks: Ranks = field(default_factory=Alone)
    """Those that compute the model together."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        model_config: Any,
        kv_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        computed_by: str = "",
        *,
        has_adapters: bool = False,
        ranks: Ranks | None = None,
    ) -> ServedModel:
        """Describe SGLang's ``module``.

        Args:
            kv_dtype: of K and V in the pool; None: as the model computes them.
            quantization: of its weights, as :func:`quantization_of` returns it.
            computed_by: as :func:`computation_of` returns it.
            has_adapters: whether SGLang serves LoRA adapters.
            ranks: those that compute the model together; None: this process alone.

        Raises:
            ConfigError: K and V of a token depend on more than the tokens before it.
        """
        kv_dtype, ranks = kv_dtype or model_config.dtype, ranks or Alone()
        architecture, shape = type(module).__name__, shape_of(model_config, kv_dtype, ranks.size)
        cores = attention_cores(module)
        is_inside = not any(name.endswith(_LOOSE) for name in cores)
        follows_passes = not is_inside or any(hasattr(each, _FOLLOWS_PASSES) for each in module.modules())
        problem = _problem(cores.values()) or rotation_problem(model_config, follows_passes=follows_passes)
        if problem is not None:
            raise ConfigError(f"--hierarchical-cache hcache does not support {architecture}: {problem}")
        is_regular = [core.layer_id for core in cores.values()] == list(range(shape.num_layers))
        named = cores.items() if is_regular and is_inside else ()
        return cls(
            module=module,
            attention=tuple(_attention(module, *each) for each in named),
            architecture=architecture,
            shape=shape,
            dtype=model_config.dtype,
            kv_dtype=kv_dtype,
            context_length=int(model_config.context_len),
            vocabulary=int(model_config.vocab_size),
            config=_canonical(model_config.hf_config),
            quantization=quantization,
            computed_by=computed_by,
            has_adapters=has_adapters,
            ranks=ranks,
        )

    @property
    def keeps_rounded_kv(self) -> bool:
        """Whether the pool rounds K and V, to FP8. Then they are stored as they are there."""
        return self.kv_dtype is not self.dtype

    @property
    def why_not_hidden(self) -> str | None:
        """See :func:`why_not_hidden`."""
        rounded_to = self.kv_dtype if self.keeps_rounded_kv else None
        return why_not_hidden(rounded_to, self.quantization, self.has_adapters, self.ranks.size)

    @property
    def may_run_first_layers(self) -> bool:
        """Whether a restore may recompute them by themselves: with no adapter of a request, and on one rank."""
        return not self.has_adapters and self.ranks.size == 1

    @property
    def row_dtype(self) -> torch.dtype:
        """Element type of the rows that are stored."""
        return torch.uint8 if self.keeps_rounded_kv else self.dtype

    def row_bytes(self, method: Method) -> int:
        """Bytes of what one layer stores of a token."""
        return self.shape.kv_row_bytes if method is Method.KV else self.shape.hidden_row_bytes

    def layout(self, methods: Sequence[Method]) -> StateLayout:
        """What is stored of a token, with a method for each layer."""
        return StateLayout.of(methods, self.shape.hidden_row_bytes, self.shape.kv_row_bytes)

    def projectors(self) -> Iterator[tuple[str, Projector]]:
        """Names and projectors that may be right for this model, the quickest first. The self-check decides."""
        if self.why_not_hidden is not None:
            return
        forms = [form for each in self.attention if (form := describe(each)) is not None]
        if forms and len(forms) == len(self.attention):
            yield "described", DescribedProjector(forms)
        try:
            if self.attention:
                yield "generic", GenericProjector(self.attention)
        except ValueError as error:
            logger.info("hcache: %s: %s", self.architecture, error)

    def weights(self) -> bytes:
        """Fingerprint of the weights that are loaded now: of what a checkpoint holds. Reads all of them.

        Of those of all ranks: what a layer computes on one goes into the next layer on the others.

        Buffers that are worked out when the model is loaded, as cosines of positions are, follow from the
        configuration, and their last bits need not be the same at every start: with them in it, a start that
        rounds otherwise would find nothing of what was stored.
        """
        held = {_bare(name): value for name, value in self.module.state_dict().items()}
        if self.quantization is not None:
            held |= dict(_loose_weights(self.module))
        own = weights_fingerprint(
            (name, value) for name, value in held.items() if isinstance(value, torch.Tensor)
        )
        return parts_fingerprint(self.ranks.all_of(own))

    def namespace(self, layout: StateLayout, weights: bytes) -> Namespace:
        """Namespace for requests without a tenant; ``weights`` as :meth:`weights` returns them.

        Its text is the same on all ranks, so that its id is.
        """
        text = f"{self.architecture}|{self.dtype}|{layout}|tp{self.ranks.size}|pp1|{self.config}|{self.computed_by}"
        if self.keeps_rounded_kv:
            own = [_scales(core) for core in attention_cores(self.module).values()]
            scales = list(chain.from_iterable(self.ranks.all_of(own)))
            text += f"|{self.kv_dtype}|{scales}"
        if self.quantization is not None:
            text += f"|{self.quantization}"
        rank = self.ranks.rank if self.ranks.size > 1 else None
        return Namespace(model=weights, layout=text, rank=rank)

    def watch(
        self, layers: Iterable[int], on_layer: OnLayer, end_layer: Callable[[], None] | None = None
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Call ``on_layer`` with the input of the attention of each of ``layers`` from now on, where it is known.

        Args:
            end_layer: called after each of those attentions, also if it raised.
        """
        handles = []
        for layer in layers if self.attention else ():
            module = self.attention[layer].module
            names = list(inspect.signature(module.forward).parameters)
            if HIDDEN_STATES in names:
                hook = _pre_hook(names.index(HIDDEN_STATES), layer, on_layer)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                if end_layer is not None:
                    handles.append(module.register_forward_hook(_post_hook(end_layer), always_call=True))
        return handles


def attention_cores(module: nn.Module) -> dict[str, Any]:
    """Path -> SGLang's attention modules inside ``module``, in the order of their layers."""
    found: dict[str, Any] = {
        name: child for name, child in module.named_modules() if type(child).__name__ == _ATTENTION
    }
    found = found or dict(_loose_cores(module))
    return dict(sorted(found.items(), key=lambda named: int(named[1].layer_id)))


def _loose_cores(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of the Transformers backend, each under the first of Hugging Face's modules that has its layer's number."""
    cores = {layer: core for child in module.modules() for layer, core in getattr(child, _LOOSE, {}).items()}
    for name, child in module.named_modules():
        core = cores.pop(getattr(child, "layer_idx", None), None)
        if core is not None:
            yield f"{name}.{_LOOSE}", core


def _problem(cores: Collection[Any]) -> str | None:
    """Why a model with the attention modules ``cores`` cannot be served; None: it can."""
    if any(core.attn_type.value != _DECODER or core.is_cross_attention for core in cores):
        return (
            "not all of its attention is that of a decoder, where K and V depend on the tokens before alone"
        )
    return None if cores else "it finds no attention"


def _scales(core: Any) -> tuple[Any, Any]:
    """What K and V of a layer are divided by before they are rounded; None: by nothing.

    Those of a checkpoint are there as numbers and as tensors; ``--quantization-param-path`` puts numbers in the place
    of the tensors, and leaves the others None.
    """
    exact, held = (core.k_scale_float, core.v_scale_float), (core.k_scale, core.v_scale)
    k, v = (second if first is None else first for first, second in zip(exact, held, strict=True))
    return k, v


def decoder_layer(module: nn.Module, path: str) -> nn.Module | None:
    """The layer that the attention at ``path`` belongs to: the innermost numbered module around it."""
    parts = path.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
    return module.get_submodule(".".join(parts[: numbered[-1] + 1])) if numbered else None


def attention_end(module: nn.Module, path: str) -> nn.Module | None:
    """What has run when the attention at ``path`` has: nothing calls those of the Transformers backend as modules."""
    return decoder_layer(module, path) if path.endswith(_LOOSE) else module.get_submodule(path)


def _attention(module: nn.Module, path: str, core: Any) -> Attention:
    parent, _, name = path.rpartition(".")
    return Attention(
        module=module.get_submodule(parent),
        core=name,
        heads=core.tp_q_head_num,
        kv_heads=core.tp_k_head_num,
        head_dim=core.head_dim,
    )


def shape_of(model_config: Any, kv_dtype: torch.dtype | None = None, num_ranks: int = 1) -> ModelShape:
    """Sizes of a model, from SGLang's ``ModelConfig``.

    Args:
        kv_dtype: of K and V in the pool; None: as the model computes them.
        num_ranks: among which the heads of K and V are divided; where they are fewer, several ranks have the same.

    Raises:
        ConfigError: sizes that we cannot read, or heads that cannot be divided.
    """
    shape = _whole_shape(model_config, (kv_dtype or model_config.dtype).itemsize)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise ConfigError(
            f"--tp-size {num_ranks} cannot divide {heads} heads with {kv_heads} of K and V, which {shape.name} has"
        )
    return replace(shape, num_kv_heads=max(1, kv_heads // num_ranks))


def _whole_shape(model_config: Any, kv_dtype_bytes: int) -> ModelShape:
    name = printable(Path(model_config.model_path).name) or "model"
    dtype = str(model_config.dtype).removeprefix("torch.")
    config = model_config.hf_config.to_dict()
    try:
        return replace(ModelShape.from_config(config, name, dtype), kv_dtype_bytes=kv_dtype_bytes)
    except ValueError as error:
        logger.debug("hcache: sizes of %s are SGLang's: %s", name, error)
    heads, ffn_size = model_config.num_attention_heads, config.get("intermediate_size")
    try:
        return ModelShape(
            name=name,
            num_layers=model_config.num_hidden_layers,
            hidden_size=model_config.hidden_size,
            num_heads=heads,
            num_kv_heads=model_config.get_num_kv_heads(1),
            head_size=model_config.head_dim,
            # For counted costs only; a server measures.
            ffn=FFNKind.GATED if ffn_size else FFNKind.PLAIN,
            ffn_size=ffn_size or 4 * model_config.hidden_size,
            hidden_dtype_bytes=model_config.dtype.itemsize,
            kv_dtype_bytes=kv_dtype_bytes,
        )
    except ValueError as error:
        raise ConfigError(f"--hierarchical-cache hcache cannot use the model {name}: {error}") from None


def _bare(path: str) -> str:
    """``path`` as it is in a model without adapters."""
    return ".".join(part for part in path.split(".") if part != _BASE)


def _loose_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices that a quantisation left beside the parameters of ``module``, as SGLang's for GGUF does.

    Not vectors: those are work space and addresses, which no two starts have in common.
    """
    for path, child in module.named_modules():
        if hasattr(child, _BASE):
            continue  # beside its weights, which are those of the other, it has adapters
        for name, value in vars(child).items():
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                yield f"{_bare(path)}.{name}", value


def _pre_hook(
    place: int, index: int, on_layer: OnLayer
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        on_layer(index, named[HIDDEN_STATES] if HIDDEN_STATES in named else inputs[place])

    return hook


def _post_hook(end_layer: Callable[[], None]) -> Callable[[nn.Module, object, object], None]:
    return lambda _module, _inputs, _output: end_layer()


def _canonical(hf_config: Any) -> str:
    settings = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return json.dumps(settings, sort_keys=True, default=str)
