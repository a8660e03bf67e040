"""What a served model is known by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from sglang_hcache.core.layout import Method, PlanKind, StateLayout
from sglang_hcache.device.attention import Attention
from sglang_hcache.plan.shapes import FFNKind, ModelShape
from sglang_hcache.sglang_plugin.seam.computation import computation_of
from sglang_hcache.sglang_plugin.seam.gpu import may_store_hidden
from sglang_hcache.sglang_plugin.seam.model import ServedModel, attention_end
from sglang_hcache.sglang_plugin.seam.ranks import Alone


class Layer(nn.Module):
    """Weights, a statistic that a checkpoint holds, and something worked out when it is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("cosines", torch.arange(8.0).cos(), persistent=False)


@contextmanager
def changed(tensor: torch.Tensor) -> Iterator[None]:
    """One bit of one value is another."""
    words = tensor.detach().view(torch.int32).view(-1)
    words[3] ^= 1
    yield
    words[3] ^= 1


def model(module: nn.Module) -> ServedModel:
    others: dict[str, Any] = dict.fromkeys((field.name for field in fields(ServedModel)), None)
    return ServedModel(**{**others, "module": module, "ranks": Alone()})


@pytest.mark.parametrize(
    ("name", "counts"), [("linear.weight", True), ("linear.bias", True), ("mean", True), ("cosines", False)]
)
def test_weights_are_what_a_checkpoint_holds(name: str, counts: bool) -> None:
    module = Layer()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = model(module).weights()
    with changed(tensors[name]):
        assert (model(module).weights() != before) == counts
    assert model(module).weights() == before == model(Layer()).weights()


class Wrapped(nn.Module):
    """As SGLang wraps what an adapter may change: the same weights, twice in the tree."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.weight, self.bias = base_layer.weight, base_layer.bias


def test_weights_are_the_same_where_adapters_may_come() -> None:
    plain, wrapped = Layer(), Layer()
    wrapped.linear = Wrapped(wrapped.linear)  # type: ignore[assignment]
    assert model(wrapped).weights() == model(plain).weights()
    with changed(wrapped.linear.weight):
        assert model(wrapped).weights() != model(plain).weights()


class Attends(nn.Module):
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class AttendsToX(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_layers_are_watched_where_their_input_is_known() -> None:
    modules = [Attends(), AttendsToX(), Attends()]
    attention = tuple(Attention(module, "attn", heads=1, kv_heads=1, head_dim=8) for module in modules)
    seen: list[tuple[int, float] | str] = []
    watched = replace(model(Layer()), attention=attention).watch(
        range(3), lambda layer, hidden: seen.append((layer, float(hidden))), lambda: seen.append("over")
    )
    modules[0](torch.tensor(0), torch.tensor(1.0))
    modules[1](torch.tensor(2.0))
    modules[2](torch.tensor(0), hidden_states=torch.tensor(3.0))
    assert seen == [(0, 1.0), "over", (2, 3.0), "over"]
    for handle in watched:
        handle.remove()
    modules[0](torch.tensor(0), torch.tensor(1.0))
    assert len(seen) == 4


def test_attention_that_fails_is_over_too() -> None:
    class Fails(Attends):
        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    seen: list[str] = []
    attention = (Attention(Fails(), "attn", heads=1, kv_heads=1, head_dim=8),)
    replace(model(Layer()), attention=attention).watch(
        range(1), lambda *_: seen.append("begins"), lambda: seen.append("over")
    )
    with pytest.raises(MemoryError):
        attention[0].module(torch.tensor(0), torch.tensor(1.0))
    assert seen == ["begins", "over"]


def test_a_model_whose_attention_is_outside_of_its_modules_shows_nothing() -> None:
    """On a GPU layers are watched where K and V are stored, too."""
    assert replace(model(Layer()), attention=()).watch(range(3), lambda *_: None) == []


class RadixAttention(nn.Module):
    """What is read of SGLang's class of this name."""

    layer_id = 0

    def __init__(self, scale: float | None, held: float | torch.Tensor | None = None) -> None:
        super().__init__()
        self.k_scale_float = self.v_scale_float = scale
        self.k_scale = self.v_scale = held


def test_rounded_kv_is_served_only_where_it_is_rounded_alike() -> None:
    def namespace(
        kv_dtype: torch.dtype, scale: float | None = 1.0, held: float | torch.Tensor | None = None
    ) -> bytes:
        served = replace(model(RadixAttention(scale, held)), dtype=torch.bfloat16, kv_dtype=kv_dtype)
        return served.namespace(StateLayout.of((Method.KV,), 8, 8), bytes(32)).namespace_id()

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert len({namespace(torch.bfloat16), namespace(e4m3), namespace(e5m2), namespace(e4m3, 2.0)}) == 4
    assert namespace(torch.bfloat16) == namespace(torch.bfloat16, 2.0), "nothing is scaled there"
    assert namespace(e4m3) == namespace(e4m3, held=torch.tensor(1.0)), "a checkpoint sets both"
    # --quantization-param-path sets one of them: a number where else there is a tensor.
    assert len({namespace(e4m3, None), namespace(e4m3, None, 1.5), namespace(e4m3, None, 2.0)}) == 3


def test_a_namespace_has_one_id_on_all_ranks_and_other_keys_on_each() -> None:
    """SGLang reads scales from a file that may have other ones for each rank."""
    scales = (1.0, 2.0)

    class Rank(Alone):
        size = len(scales)

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_of(self, value: Any) -> list[Any]:
            assert value == [(scales[self.rank],) * 2]
            return [[(scale, scale)] for scale in scales]

    found = [
        replace(
            model(RadixAttention(scale)), ranks=Rank(rank), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn
        ).namespace(StateLayout.of((Method.KV,), 8, 8), bytes(32))
        for rank, scale in enumerate(scales)
    ]
    assert found[0].namespace_id() == found[1].namespace_id()
    assert found[0].root_key() != found[1].root_key()


@pytest.mark.filterwarnings("ignore:.*[Dd]eprecat:UserWarning")
def test_weights_that_a_quantisation_made_count() -> None:
    """torchao's are parameters made of others; SGLang's for GGUF, plain tensors beside the parameters."""
    module = Layer()
    quantize_(module, Int8WeightOnlyConfig())
    module.linear.packed = torch.ones(8, 8)  # type: ignore[assignment]
    served = replace(model(module), quantization="int8wo", dtype=torch.float32, kv_dtype=torch.float32)
    parts, before = served.module.linear.weight.tensor_impl, served.weights()
    for part in (parts.int_data, parts.scale, module.linear.packed):
        with changed(part):
            assert served.weights() != before
    assert served.weights() == before
    module.linear.workspace = torch.zeros(4)  # type: ignore[assignment]
    assert served.weights() == before, "a vector is no weight"


def test_adapters_beside_quantised_weights_do_not_count() -> None:
    """SGLang's wrappers keep the adapters of a batch in plain tensors."""
    plain, wrapped = Layer(), Layer()
    for module in (plain, wrapped):
        module.linear.packed = torch.ones(8, 8)  # type: ignore[assignment]
    wrapped.linear = Wrapped(wrapped.linear)  # type: ignore[assignment]
    wrapped.linear.A_buffer = torch.ones(2, 4, 8)  # type: ignore[assignment]

    def weights(module: nn.Module) -> bytes:
        return replace(model(module), quantization="gguf").weights()

    before = weights(wrapped)
    assert before == weights(plain)
    with changed(wrapped.linear.A_buffer):
        assert weights(wrapped) == before
    with changed(wrapped.linear.base_layer.packed):
        assert weights(wrapped) != before


def test_quantised_weights_are_served_only_where_they_compute_alike() -> None:
    def namespace(quantization: str | None) -> bytes:
        served = replace(
            model(Layer()), dtype=torch.float32, kv_dtype=torch.float32, quantization=quantization
        )
        return served.namespace(StateLayout.of((Method.KV,), 8, 8), bytes(32)).namespace_id()

    assert len({namespace(None), namespace("torchao int8wo"), namespace("torchao int8dq")}) == 3


@dataclass
class Arguments:
    """What is read of SGLang's ``ServerArgs``."""

    device: str = "cuda"
    attention_backend: str = "fa3"
    decode_attention_backend: str | None = None
    enable_fused_qk_norm_rope: bool = False
    enable_deterministic_inference: bool = False
    rl_on_policy_target: str | None = None
    enable_lora: bool | None = None
    lora_backend: str = "csgmv"

    def get_attention_backends(self) -> tuple[str, str]:
        return self.attention_backend, self.decode_attention_backend or self.attention_backend


def test_a_pass_ends_where_the_attention_has_run() -> None:
    """Of the Transformers backend no module's end is called there, but that of the layer around it."""
    layers = nn.ModuleList(
        nn.ModuleDict({"self_attn": nn.ModuleDict({"attn": nn.Identity()})}) for _ in range(3)
    )
    model = nn.ModuleDict({"layers": layers})
    assert attention_end(model, "layers.1.self_attn.attn") is layers[1]["self_attn"]["attn"]
    assert attention_end(model, "layers.1.self_attn.attention_instances") is layers[1]


def namespace_of(has_amx: bool = False, **given: object) -> bytes:
    served = replace(
        model(Layer()),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        computed_by=computation_of(Arguments(**given), has_amx=has_amx),  # type: ignore[arg-type]
    )
    return served.namespace(StateLayout.of((Method.KV,), 8, 8), bytes(32)).namespace_id()


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cpu"},
        {"has_amx": True},
        {"attention_backend": "triton"},
        {"decode_attention_backend": "triton"},
        {"enable_fused_qk_norm_rope": True},
        {"enable_deterministic_inference": True},
    ],
)
def test_only_chunks_that_were_computed_in_the_same_way_serve(other: dict[str, Any]) -> None:
    assert namespace_of() == namespace_of(decode_attention_backend="fa3")
    assert namespace_of() != namespace_of(**other)


@pytest.mark.parametrize("passes", ["PREFILL", "DECODE"])
def test_scores_that_attention_leaves_out_count(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = namespace_of()
    monkeypatch.setenv(f"SGLANG_SKIP_SOFTMAX_{passes}_THRESHOLD_SCALE_FACTOR", "0.5")
    assert namespace_of() != exact


@pytest.mark.parametrize("other", [{"rl_on_policy_target": "fsdp"}, {"enable_lora": True}])
def test_where_bits_are_promised_what_else_they_depend_on_counts(other: dict[str, Any]) -> None:
    assert namespace_of() == namespace_of(**other)
    promised = {"enable_deterministic_inference": True}
    assert namespace_of(**promised) != namespace_of(**promised, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kv_dtype", "quantization", "has_adapters", "why"),
    [
        (torch.float32, None, False, None),
        (torch.float8_e4m3fn, None, False, "rounded"),
        (torch.float32, "awq", False, "quantised (awq)"),
        (torch.float32, None, True, "LoRA"),
    ],
)
def test_hidden_states_of_plain_weights_and_a_plain_pool_only(
    kv_dtype: torch.dtype, quantization: str | None, has_adapters: bool, why: str | None
) -> None:
    large_kv = ModelShape(
        name="m",
        num_layers=1,
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        ffn=FFNKind.PLAIN,
        ffn_size=8,
        hidden_dtype_bytes=4,
        kv_dtype_bytes=4,
    )
    served = replace(
        model(Layer()),
        shape=large_kv,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        quantization=quantization,
        has_adapters=has_adapters,
        attention=(Attention(Attends(), "attn", heads=1, kv_heads=1, head_dim=8),),
    )
    assert (served.why_not_hidden is None) == (why is None) == may_store_hidden(served, PlanKind.AUTO)
    assert (why or "") in (served.why_not_hidden or "")
    assert why is None or not list(served.projectors())
