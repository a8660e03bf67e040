"""K and V of hidden states, by a description and by the attention module itself: both are what attention would get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from sglang_hcache.device.attention import Attention, describe
from sglang_hcache.device.generic import GenericProjector
from sglang_hcache.device.projector import DescribedProjector

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, ROWS = 4, 2, 8, 24, 11
Q_SIZE, KV_SIZE = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


class QKVParallelLinear(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden), None


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * rows / rows.pow(2).mean(-1, keepdim=True).sqrt()


class Rotation(nn.Module):
    """Adds the position: what it does does not matter here, only that it is done."""

    head_size = HEAD_DIM

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query + positions[:, None], key + positions[:, None]


class KernelOfAGpu(Rotation):
    """Takes what SGLang's kernel for heads of odd sizes takes (``pos_enc.cuh``)."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert query.is_contiguous()
        heads, kv_heads = (each[0].numel() // HEAD_DIM for each in (query, key))
        assert heads % kv_heads == 0
        return query, key


class Core(nn.Module):
    """Attends. Keeps what it was given."""

    layer_id = 3

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        self.given = qkv
        return qkv[0]


class SelfAttention(nn.Module):
    def __init__(
        self, *, bias: bool, norm_size: int | None, rotates: bool, clip: float | None = None
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(HIDDEN, Q_SIZE + 2 * KV_SIZE, bias=bias)
        if norm_size is not None:
            self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(norm_size)
        if rotates:
            self.rotary_emb = Rotation()
        self.clip_qkv = clip
        self.attn = Core()
        self.o_proj = nn.Linear(Q_SIZE, HIDDEN)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: object
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        if self.clip_qkv is not None:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = qkv.split([Q_SIZE, KV_SIZE, KV_SIZE], dim=-1)
        if hasattr(self, "k_norm"):
            size = self.k_norm.weight.numel()
            key = self.k_norm(key.reshape(-1, size)).view(-1, KV_SIZE)
            query = self.q_norm(query.reshape(-1, HEAD_DIM)).view(-1, Q_SIZE)
        if hasattr(self, "rotary_emb"):
            query, key = self.rotary_emb(positions, query, key)
        assert self.attn.layer_id == 3
        attended: torch.Tensor = self.o_proj(self.attn(query, key, value))
        return attended


KINDS = {
    "plain": {"bias": False, "norm_size": None, "rotates": True},
    "bias": {"bias": True, "norm_size": None, "rotates": True},
    "norm of a head": {"bias": False, "norm_size": HEAD_DIM, "rotates": True},
    "norm of a row": {"bias": True, "norm_size": KV_SIZE, "rotates": True},
    "no rotation": {"bias": True, "norm_size": None, "rotates": False},
    "clip": {"bias": True, "norm_size": None, "rotates": True, "clip": 0.2},
}


def layer(kind: str) -> Attention:
    torch.manual_seed(len(kind))
    return Attention(SelfAttention(**KINDS[kind]), "attn", HEADS, KV_HEADS, HEAD_DIM)  # type: ignore[arg-type]


def truth(attention: Attention, hidden: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    attention.module(positions, hidden, None)
    given = attention.module.attn.given  # type: ignore[union-attr]
    return [part.view(ROWS, KV_HEADS, HEAD_DIM) for part in given[1:]]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_projector_makes_what_attention_gets(kind: str) -> None:
    attention = layer(kind)
    hidden, positions = torch.randn(ROWS, HIDDEN), torch.arange(5, 5 + ROWS)
    expected = truth(attention, hidden, positions)
    form = describe(attention)
    assert form is not None
    projectors = {
        "described": DescribedProjector([form]),
        "generic": GenericProjector([attention]),
    }
    for name, projector in projectors.items():
        for mine, true in zip(projector.project(0, hidden, positions), expected, strict=True):
            assert torch.allclose(mine, true, atol=1e-6), name


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_there_already_gets_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    attention = layer(kind)
    attention.module.to(dtype)
    form = describe(attention)
    assert form is not None
    projector, hidden = DescribedProjector([form]), torch.randn(ROWS, HIDDEN, dtype=dtype)
    out = torch.full((ROWS, 2 * KV_SIZE), torch.nan, dtype=dtype)
    key, value = projector.project_unrotated(0, hidden, out)
    expected_key, expected_value = projector.project_unrotated(0, hidden)
    assert torch.equal(key, expected_key)
    assert torch.equal(value, expected_value)
    assert value.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


@torch.no_grad()
def test_a_gpus_rotation_gets_as_many_heads_of_the_query_as_of_the_key() -> None:
    """On torch's device without memory, which is no CPU either."""
    attention = layer("plain")
    attention.module.rotary_emb = KernelOfAGpu()
    attention.module.to("meta")
    hidden, positions = torch.empty(ROWS, HIDDEN, device="meta"), torch.arange(ROWS, device="meta")
    form = describe(attention)
    assert form is not None
    assert DescribedProjector([form]).project(0, hidden, positions)[0].shape == (ROWS, KV_HEADS, HEAD_DIM)


@torch.no_grad()
def test_what_a_description_leaves_out_is_missing() -> None:
    attention = layer("norm of a row")
    hidden, positions = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    key, value = truth(attention, hidden, positions)
    form = describe(attention)
    assert form is not None
    for wrong in (replace(form, has_bias=False), replace(form, key_norm=None), replace(form, rotary=None)):
        mine, _ = DescribedProjector([wrong]).project(0, hidden, positions)
        assert not torch.allclose(mine, key, atol=1e-2)
    _, mine = DescribedProjector([replace(form, has_bias=False)]).project(0, hidden, positions)
    assert not torch.allclose(mine, value, atol=1e-2)


@torch.no_grad()
def test_weights_are_those_of_the_moment() -> None:
    """Updating weights at run time replaces the tensors."""
    attention = layer("bias")
    form = describe(attention)
    assert form is not None
    projectors = [DescribedProjector([form]), GenericProjector([attention])]
    attention.module.qkv_proj.weight = nn.Parameter(torch.randn(Q_SIZE + 2 * KV_SIZE, HIDDEN))  # type: ignore[union-attr]
    hidden, positions = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    expected, _ = truth(attention, hidden, positions)
    for projector in projectors:
        assert torch.allclose(projector.project(0, hidden, positions)[0], expected, atol=1e-5)


@torch.no_grad()
def test_the_generic_projector_leaves_the_model_alone() -> None:
    attention = layer("bias")
    seen: list[str] = []
    attention.module.register_forward_pre_hook(lambda *_: seen.append("module"))
    attention.module.attn.register_forward_pre_hook(lambda *_: seen.append("attn"))  # type: ignore[union-attr]
    projector = GenericProjector([attention])
    hidden, positions = torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    projector.project(0, hidden, positions)
    assert seen == [], "hooks are for passes of the model: they capture"
    assert attention.module(positions, hidden, None).shape == (ROWS, HIDDEN)
    assert seen == ["module", "attn"]


def test_what_looks_otherwise_is_not_described() -> None:
    more = layer("plain")
    more.module.sink = nn.Linear(1, 1)
    assert describe(more) is None
    quantised = layer("plain")
    quantised.module.qkv_proj.weight = nn.Parameter(  # type: ignore[union-attr]
        torch.zeros(Q_SIZE + 2 * KV_SIZE, HIDDEN, dtype=torch.int8), requires_grad=False
    )
    assert describe(quantised) is None
    assert describe(replace(layer("plain"), kv_heads=KV_HEADS + 1)) is None
    norm = layer("norm of a head")
    norm.module.k_norm = Norm(3)
    assert describe(norm) is None


def test_attention_without_hidden_states_is_no_case_for_the_generic_projector() -> None:
    with pytest.raises(ValueError, match="nothing called hidden_states"):
        GenericProjector([Attention(nn.Sequential(nn.Linear(2, 2)), "0", 1, 1, 2)])


def test_a_module_that_never_attends_is_an_error() -> None:
    attention = layer("plain")
    projector = GenericProjector([attention])
    runner = projector._runners[0]
    runner.forward = lambda **_: None  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="layer 0 handed over no K and V"):
        projector.project(0, torch.randn(ROWS, HIDDEN), torch.arange(ROWS))
