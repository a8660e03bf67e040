"""The patches for SGLang, and the hooks that do the same: they apply, and the functions give the same as before."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patched_sglang import PATCHES, FilePatch, all_patches, installed_sglang, write_patched_sglang

NAMES = [path.name for path in all_patches()]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The two patched modules, loaded under other names."""
    folder = write_patched_sglang(tmp_path_factory.mktemp("patched"))

    def load(name: str) -> ModuleType:
        path = folder / f"sglang/srt/{name}.py"
        assert not path.is_symlink()
        spec = importlib.util.spec_from_file_location(f"patched_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return SimpleNamespace(
        attention=load("layers/attention/torch_native_backend"), paged=load("mem_cache/allocator/paged")
    )


@pytest.mark.parametrize("name", NAMES)
def test_patch_applies_to_the_installed_release(name: str) -> None:
    patch = FilePatch.read(PATCHES / name)
    before = (installed_sglang().parent / patch.target).read_text()
    after = patch.apply(before)
    assert after != before
    compile(after, name, "exec")


def test_readme_names_every_patch() -> None:
    assert len(NAMES) == 5
    readme = (PATCHES / "README.md").read_text()
    assert [name for name in NAMES if name not in readme] == []


def test_a_patch_that_does_not_fit_is_noticed() -> None:
    patch = FilePatch.read(PATCHES / NAMES[0])
    before = (installed_sglang().parent / patch.target).read_text()
    with pytest.raises(AssertionError, match="hunk at line"):
        patch.apply("# one line more\n" + before)
    with pytest.raises(AssertionError, match="hunk at line"):
        patch.apply(patch.apply(before))


def test_the_copy_is_links_but_for_the_patched_files(tmp_path: Path) -> None:
    write_patched_sglang(tmp_path)
    changed = sorted(
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and not any(part.is_symlink() for part in (path, *path.parents))
    )
    assert changed == sorted(str(FilePatch.read(path).target) for path in all_patches())


# -- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One call of ``_run_sdpa_forward_extend``: (prefix, new tokens) of every request."""

    requests: tuple[tuple[int, int], ...] = ((0, 50), (64, 1), (129, 77), (0, 1), (640, 300))
    kv_heads: int = 4
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    encoder: tuple[int, ...] | None = None


CASES = {
    "causal": Attention(),
    "scaled": Attention(options={"causal": True, "scaling": 0.3}),
    "gqa": Attention(kv_heads=2, options={"causal": True, "enable_gqa": True}),
    "bfloat16": Attention(dtype=torch.bfloat16),
    "bfloat16 gqa": Attention(kv_heads=1, dtype=torch.bfloat16, options={"causal": True, "enable_gqa": True}),
    "pool of another dtype": Attention(pool_dtype=torch.bfloat16),
    "window": Attention(options={"causal": True, "sliding_window_size": 40}),
    "window of nothing else": Attention(options={"causal": True, "sliding_window_size": 0}),
    "no window": Attention(options={"causal": True, "sliding_window_size": -1}),
    "not causal": Attention(options={"causal": False}),
    "after an encoder": Attention(requests=((0, 20), (16, 9)), encoder=(7, 12)),
    "cross": Attention(
        requests=((0, 20), (16, 9)), encoder=(7, 12), options={"causal": False, "is_cross_attn": True}
    ),
}
HEADS, HEAD_DIM, SLOTS = 4, 16, 5000


def run_attention(function: Callable[..., torch.Tensor], case: Attention) -> torch.Tensor:
    """The output of ``function`` for K, V and queries that are the same in every call."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    encoder = case.encoder or (0,) * len(case.requests)
    pool = [random(SLOTS, case.kv_heads, HEAD_DIM).to(case.pool_dtype or case.dtype) for _ in "kv"]
    num_new = sum(new for _, new in case.requests)
    query = random(num_new, HEADS, HEAD_DIM).to(case.dtype)
    width = max(before + sum(request) for before, request in zip(encoder, case.requests, strict=True))
    free = torch.randperm(SLOTS, generator=generator).to(torch.int32)
    req_to_token = torch.zeros(8, width, dtype=torch.int32)
    rows = torch.tensor([6, 1, 4, 0, 3][: len(case.requests)])
    req_to_token[rows] = free[: len(rows) * width].view(len(rows), width)
    prefixes, new = (torch.tensor(column) for column in zip(*case.requests, strict=True))
    encoder_lens = None if case.encoder is None else torch.tensor(case.encoder)
    output = torch.full_like(query, float("nan"))
    arguments = (query, output, *pool, req_to_token, rows, prefixes + new, prefixes, new, encoder_lens)
    result = function(*arguments, **case.options)
    assert result is output
    return output


@pytest.fixture(scope="module")
def attention(patched: SimpleNamespace) -> dict[str, Callable[..., torch.Tensor]]:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_hcache.sglang_plugin.compat.v0_5_17 import cpu

    original = object.__new__(TorchNativeAttnBackend)  # the functions use nothing of the instance
    return {
        "original": original._run_sdpa_forward_extend,
        "patch": object.__new__(patched.attention.TorchNativeAttnBackend)._run_sdpa_forward_extend,
        "hook": lambda *args, **kwargs: cpu.extend_attention(original, *args, **kwargs),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("which", ["patch", "hook"])
def test_attention_is_as_before(
    attention: dict[str, Callable[..., torch.Tensor]], which: str, case: Attention
) -> None:
    expected = run_attention(attention["original"], case)
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(run_attention(attention[which], case), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("which", ["patch", "hook"])
def test_attention_computes_new_rows_only(
    attention: dict[str, Callable[..., torch.Tensor]], which: str
) -> None:
    case = Attention(requests=((640, 3),))

    def largest_query(function: Callable[..., torch.Tensor]) -> int:
        with RecordedQueries() as queries:
            run_attention(function, case)
        return max(queries.lengths)

    assert largest_query(attention["original"]) == 643
    assert largest_query(attention[which]) == 3


class RecordedQueries(torch.overrides.TorchFunctionMode):
    """While active, notes how many query rows each attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.lengths.append(args[0].shape[-2])
        return func(*args, **(kwargs or {}))


# -- paged allocation ----------------------------------------------------------------------------


class Reference:
    """Paged allocation in plain Python: the tokens of a request fill its last page, then pages off the list."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.free = list(range(1, num_pages + 1))
        self.page_size = page_size

    def extend(self, requests: list[list[int]], counts: list[int]) -> list[int] | None:
        """Append slots to every request; None, and nothing changed, if there are too few pages."""
        free, given = list(self.free), []
        for request, count in zip(requests, counts, strict=True):
            slots = list(request)
            for _ in range(count):
                if len(slots) % self.page_size:
                    slots.append(slots[-1] + 1)
                elif free:
                    slots.append(free.pop(0) * self.page_size)
                else:
                    return None
            given.append(slots[len(request) :])
        for request, slots in zip(requests, given, strict=True):
            request += slots
        self.free = free
        return [slot for slots in given for slot in slots]


@pytest.fixture(scope="module")
def allocators(patched: SimpleNamespace) -> dict[str, Callable[..., Any]]:
    """Name -> makes (allocator, its alloc_extend, its alloc_decode) of so many pages of such a size."""
    from sglang.srt.mem_cache.allocator import paged

    from sglang_hcache.sglang_plugin.compat.v0_5_17 import cpu

    def make(module: ModuleType, num_pages: int, page_size: int, need_sort: bool) -> Any:
        size = num_pages * page_size
        return module.PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, need_sort)

    def of_patch(*sizes: Any) -> Any:
        allocator = make(patched.paged, *sizes)
        return allocator, allocator.alloc_extend, allocator.alloc_decode

    def of_hook(*sizes: Any) -> Any:
        allocator = make(paged, *sizes)
        return (
            allocator,
            lambda *args: cpu.alloc_extend(allocator, *args),
            lambda *args: cpu.alloc_decode(allocator, *args),
        )

    return {"patch": of_patch, "hook": of_hook}


def last_slots(requests: list[list[int]]) -> torch.Tensor:
    return torch.tensor([request[-1] if request else -1 for request in requests])


@pytest.mark.parametrize("page_size", [2, 16, 64])
@pytest.mark.parametrize("which", ["patch", "hook"])
def test_allocation_is_that_of_the_reference(
    allocators: dict[str, Callable[..., Any]], which: str, page_size: int
) -> None:
    """Random batches of prefills, decodes and frees, until the pages run out again and again."""
    num_pages = 40
    allocator, alloc_extend, alloc_decode = allocators[which](num_pages, page_size, False)
    reference = Reference(num_pages, page_size)
    generator = torch.Generator().manual_seed(page_size)

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    live: list[list[int]] = []
    refused = 0
    for _ in range(300):
        action = random(0, 3)
        if action == 0:  # prefill: new requests and the next pieces of old ones
            batch = live[: random(0, 3)] + [[] for _ in range(random(1, 4))]
            counts = [random(1, 3 * page_size + 2) for _ in batch]
        else:
            batch, counts = live[: random(0, len(live) + 1)], []
        if not batch:
            continue
        before = torch.tensor([len(request) for request in batch])
        last = last_slots(batch)
        expected = reference.extend(batch, counts or [1] * len(batch))
        if counts:
            after = before + torch.tensor(counts)
            got = alloc_extend(before, before, after, after, last, sum(counts))
        else:
            got = alloc_decode(before + 1, before + 1, last)
        assert (None if got is None else got.tolist()) == expected
        assert allocator.free_pages.tolist() == reference.free
        if expected is not None:
            assert got.dtype == torch.int64
            live += [request for request in batch if not any(request is known for known in live)]
            continue
        refused += 1
        gone = live.pop(0)  # make room
        allocator.free(torch.tensor(gone))
        reference.free = sorted({slot // page_size for slot in gone}) + reference.free
        assert allocator.free_pages.tolist() == reference.free
    assert refused > 5
    assert len(live) > 1


@pytest.mark.parametrize("which", ["patch", "hook"])
def test_freed_pages_are_sorted_in_when_they_are_needed(
    allocators: dict[str, Callable[..., Any]], which: str
) -> None:
    allocator, alloc_extend, alloc_decode = allocators[which](4, 2, True)
    slots = alloc_extend(*(torch.tensor([length]) for length in (0, 0, 8, 8, -1)), 8)
    allocator.free(slots)
    assert len(allocator.free_pages) == 0
    assert alloc_decode(*(torch.tensor([value]) for value in (1, 1, -1))).tolist() == [2]
    assert alloc_extend(*(torch.tensor([length]) for length in (1, 1, 4, 4, 2)), 3).tolist() == [3, 4, 5]
    assert allocator.free_pages.tolist() == [3, 4]


# -- several ranks -------------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., bool]]:
    """Name -> ``init_model_parallel_group`` that returns whether the group would get a communicator of NCCL."""
    from sglang.srt.distributed import parallel_state

    from sglang_hcache.sglang_plugin.compat.v0_5_17 import cpu

    monkeypatch.setattr(parallel_state, "GroupCoordinator", lambda **given: given["use_pynccl"])
    original = parallel_state.init_model_parallel_group
    return {
        "original": original,
        "patch": patched_group_function(vars(parallel_state)),
        "hook": lambda *args, **kwargs: cpu.init_model_parallel_group(original, *args, **kwargs),
    }


def patched_group_function(namespace: dict[str, Any]) -> Callable[..., bool]:
    """What the patch makes of the function. Its module is not loaded again: that registers operations with torch."""
    patch = next(
        patch for patch in map(FilePatch.read, all_patches()) if "parallel_state" in str(patch.target)
    )
    source = patch.apply((installed_sglang().parent / patch.target).read_text())
    wanted = ("_BACKENDS_WITHOUT_PYNCCL", "init_model_parallel_group")
    statements = [
        statement
        for statement in ast.parse(source).body
        if getattr(statement, "name", None) in wanted
        or (isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in wanted)
    ]
    assert len(statements) == 2
    changed = dict(namespace)
    exec(compile(ast.Module(statements, []), str(patch.target), "exec"), changed)
    function: Callable[..., bool] = changed["init_model_parallel_group"]
    return function


@pytest.mark.parametrize("which", ["patch", "hook"])
def test_groups_of_gloo_alone_lose_nccl(groups: dict[str, Callable[..., bool]], which: str) -> None:
    ranks = [[0, 1]]
    assert groups["original"](ranks, 0, "gloo")
    assert not groups[which](ranks, 0, "gloo")
    assert not groups[which](ranks, 0, backend="gloo", group_name="tp")
    for backend in ("nccl", "mooncake", "gloo"):
        for wish in (True, False):
            assert groups[which](ranks, 0, backend, wish) is wish, "what the caller wants is left alone"
            assert groups[which](ranks, 0, backend, use_pynccl=wish) is wish
    for backend in ("nccl", "mooncake"):
        assert groups[which](ranks, 0, backend) == groups["original"](ranks, 0, backend)


def test_hooks_leave_a_patched_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.allocator import paged

    from sglang_hcache.sglang_plugin.compat.v0_5_17 import cpu

    def hooked() -> list[str]:
        return [name.rpartition(".")[2] for name in cpu.fixes()]

    attention, groups = "_run_sdpa_forward_extend", "init_model_parallel_group"
    assert hooked() == [attention, "alloc_extend", "alloc_decode", groups]
    monkeypatch.setattr(paged, "alloc_decode_naive", None, raising=False)
    assert hooked() == [attention, groups]
    monkeypatch.setattr(TorchNativeAttnBackend, "_make_causal_mask_reversed", None, raising=False)
    assert hooked() == [groups]
    monkeypatch.setattr(parallel_state, "_BACKENDS_WITHOUT_PYNCCL", (), raising=False)
    assert hooked() == []
