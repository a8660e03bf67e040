"""What the kernel writes is what torch's operations would have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_hcache.device.key_steps import KeyNorm, KeySteps, Rotation
from sglang_hcache.device.triton_rows import TritonRows

SLOTS, POSITIONS, UNTOUCHED = 50, 100, -7.0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALF_TYPES = DTYPES[:2]
Pools = tuple[torch.Tensor, torch.Tensor]


class Case:
    """Rows of a layer, where they go, and what should be there."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        count: int = 5,
        heads: int = 3,
        head_dim: int = 64,
        dim: int | None = None,
        halves: bool = True,
        rounds: bool = True,
        norm: int = 0,
        rounds_first: bool = False,
    ) -> None:
        draw = torch.Generator().manual_seed(count + head_dim)
        self.heads, self.head_dim, width = heads, head_dim, heads * head_dim
        # Wider than K and V, as if the query's rows were beside them.
        self.key, self.value = (
            torch.randn(count, 2 * width + 3, generator=draw).to(dtype)[:, 3:].chunk(2, dim=1)
        )
        dim = head_dim if dim is None else dim
        table = torch.rand(POSITIONS, dim, generator=draw) * 2 - 1
        rotation = Rotation(table.to(dtype) if rounds else table, halves, rounds) if dim else None
        weight = (torch.rand(norm, generator=draw) + 0.5).to(dtype)
        self.steps = KeySteps(KeyNorm(weight, 1e-5, rounds_first) if norm else None, rotation)
        self.positions = torch.randint(POSITIONS, (count,), generator=draw)
        self.slots = torch.randperm(SLOTS - 1, generator=draw)[:count]

    def pools(self) -> Pools:
        empty = torch.full((SLOTS, self.heads, self.head_dim), UNTOUCHED, dtype=self.key.dtype)
        return empty, empty.clone()

    def run(self) -> Pools:
        pools = self.pools()
        TritonRows().finish(self.key, self.value, self.steps, self.positions, self.slots, pools)
        return pools

    def expected(self) -> Pools:
        key, value = self.pools()
        shape = (-1, self.heads, self.head_dim)
        key[self.slots] = finished(self.key.reshape(shape), self.steps, self.positions)
        value[self.slots] = self.value.reshape(shape)
        return key, value


def finished(key: torch.Tensor, steps: KeySteps, positions: torch.Tensor) -> torch.Tensor:
    """What SGLang's modules do: ``RMSNorm.forward_native``, and ``apply_rotary_emb`` or its kernel in float32."""
    dtype = key.dtype
    if steps.norm is not None:
        norm, rows = steps.norm, key.reshape(-1, steps.norm.size).float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + norm.epsilon)
        rows = norm.weight * rows.to(dtype) if norm.rounds_before_weight else (rows * norm.weight).to(dtype)
        key = rows.view(key.shape)
    rotation = steps.rotation
    if rotation is None:
        return key
    turned, rest = key[..., : rotation.dim], key[..., rotation.dim :]
    if not rotation.rounds_products:
        turned = turned.float()
    cosines, sines = rotation.table[positions].unsqueeze(1).chunk(2, dim=-1)
    if rotation.pairs_halves:
        low, high = turned.chunk(2, dim=-1)
    else:
        low, high = turned[..., ::2], turned[..., 1::2]
    pairs = (low * cosines - high * sines, high * cosines + low * sines)
    together = torch.cat(pairs, dim=-1) if rotation.pairs_halves else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((together.to(dtype), rest), dim=-1)


def assert_same(mine: Pools, true: Pools) -> None:
    for one, other in zip(mine, true, strict=True):
        assert torch.equal(one, other)


def assert_close(mine: Pools, true: Pools, ulps: float) -> None:
    """K as close as ``ulps`` units in the last place of its largest value, V the same bits."""
    assert torch.equal(mine[1], true[1])
    largest = true[0].float().abs().max()
    error = (mine[0].float() - true[0].float()).abs().max() / largest
    assert error <= ulps * torch.finfo(true[0].dtype).eps, f"{error:.3g}"


# -- rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "dim", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (80, 32, torch.float16),
        (96, 96, torch.float32),
        (128, 64, torch.bfloat16),
        (6, 4, torch.float16),
        (6, 4, torch.float32),
    ],
)
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds products", "in float32"])
@pytest.mark.parametrize("halves", [True, False], ids=["halves", "neighbours"])
def test_rotated_rows_have_the_same_bits(
    dtype: torch.dtype, rounds: bool, halves: bool, head_dim: int, dim: int
) -> None:
    """An interpreter takes long: each type with each style, not with each size."""
    case = Case(dtype, head_dim=head_dim, dim=dim, halves=halves, rounds=rounds)
    assert_same(case.run(), case.expected())


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 256), (32, 128), (5, 80), (71, 64)])
def test_any_number_of_heads(heads: int, head_dim: int) -> None:
    """Also those that a program does not take at once, and none of them twice."""
    case = Case(heads=heads, head_dim=head_dim, count=2)
    assert_same(case.run(), case.expected())


@pytest.mark.parametrize("count", [0, 1, 33])
def test_any_number_of_tokens(count: int) -> None:
    case = Case(count=count)
    assert_same(case.run(), case.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_step_rows_are_copied(dtype: torch.dtype) -> None:
    case = Case(dtype, dim=0, head_dim=80)
    assert case.steps == KeySteps(None, None)
    assert_same(case.run(), case.expected())


def test_what_is_not_a_number_stays_so() -> None:
    case = Case(torch.bfloat16)
    case.key[1, 3] = torch.nan
    case.key[2, 3] = torch.inf
    mine, true = case.run()[0], case.expected()[0]
    assert torch.equal(mine.isnan(), true.isnan())
    assert mine[case.slots[1]].isnan().any()


def test_a_position_outside_the_table_makes_no_number() -> None:
    """Rather than a number from memory behind the table."""
    case = Case(torch.float32)
    case.positions[0], case.positions[1] = POSITIONS, -1
    rotated = case.run()[0][case.slots]
    assert rotated[:2].isnan().all()
    assert not rotated[2:].isnan().any()


# -- norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds_first", [False, True], ids=["rounds once", "rounds before the weight"])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "dim", "of_row"),
    [
        (torch.bfloat16, 3, 64, 64, False),
        (torch.float32, 3, 64, 64, True),
        (torch.float32, 3, 80, 32, False),
        (torch.float16, 3, 80, 0, False),
        (torch.bfloat16, 40, 80, 32, False),
        (torch.bfloat16, 40, 96, 96, True),
    ],
)
def test_normed_rows_are_as_close_as_sums_in_another_order(
    dtype: torch.dtype, rounds_first: bool, heads: int, head_dim: int, dim: int, of_row: bool
) -> None:
    """A sum in another order may move a value to its neighbour, and the rotation adds two of them."""
    norm = heads * head_dim if of_row else head_dim
    case = Case(dtype, count=3, heads=heads, head_dim=head_dim, dim=dim, norm=norm, rounds_first=rounds_first)
    assert_close(case.run(), case.expected(), ulps=2)


@pytest.mark.parametrize("rounds_first", [False, True], ids=["rounds once", "rounds before the weight"])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_nearly_all_normed_values_have_the_same_bits(dtype: torch.dtype, rounds_first: bool) -> None:
    case = Case(dtype, count=8, norm=64, rounds_first=rounds_first)
    same = (case.run()[0] == case.expected()[0]).float().mean()
    assert same > 0.999


def test_a_norm_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a norm of 63 values for 3 heads of 64"):
        Case(norm=63).run()


# -- large pools ---------------------------------------------------------------------------------

FAR = 2**31 // (2 * 256) + 5
"""A slot whose values lie behind the 2**31st."""


def _large_pools(folder: Path) -> Pools:
    """Two times 4.3 GB of addresses in files with holes: memory is taken where it is touched."""
    pools = [np.memmap(folder / name, np.float16, "w+", shape=(FAR + 1, 2, 256)) for name in "kv"]
    return torch.from_numpy(pools[0]), torch.from_numpy(pools[1])


def test_slots_behind_two_to_the_31st_value(tmp_path: Path) -> None:
    case = Case(torch.float16, heads=2, head_dim=256, count=2)
    slots, pools = torch.tensor([FAR, 7]), _large_pools(tmp_path)
    TritonRows().finish(case.key, case.value, case.steps, case.positions, slots, pools)
    expected = case.expected()
    for mine, true in zip(pools, expected, strict=True):
        assert torch.equal(mine[slots], true[case.slots])
        assert not mine[:7].any()
