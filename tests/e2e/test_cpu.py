"""SGLang on a CPU with its attention and its page allocation fixed: by the hooks, and by ``patches/``.

All other tests run with the hooks at page size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.harness import TOLERANCE, TierServer, largest_difference, random_prompt
from tests.e2e.test_serving import assert_same_pool
from tests.patched_sglang import installed_sglang, write_patched_sglang

ATTENTION = {"_run_sdpa_forward_extend"}
ALLOCATION = {"alloc_extend", "alloc_decode"}
RANKS = {"init_model_parallel_group"}


def server_for(folder: Path, model: Path, page_size: int, packages: Sequence[Path] = ()) -> TierServer:
    return TierServer(
        folder,
        [
            *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "3072"),
            *("--chunked-prefill-size", "512", "--page-size", str(page_size)),
            *("--hcache-host-size", "64MB"),
        ],
        packages=packages,
    )


def assert_restored_equals_recomputed(server: TierServer) -> None:
    """One prompt that comes back from host memory, then continued from the device behind what was decoded."""
    assert "method hidden; self-check error" in server.process.log_text()
    prompt = random_prompt(1, 700)
    recomputed = server.recompute(prompt, rid="probe-recomputed", tokens=20)
    server.ask(prompt, tokens=20)
    server.to_tiers()
    restored = server.ask(prompt, rid="probe-restored", tokens=20)
    assert restored.host == 640
    assert largest_difference(restored, recomputed) <= TOLERANCE
    assert_same_pool(server, "restored", "recomputed")
    longer = [*prompt, *restored.tokens[:-1], *random_prompt(2, 50)]
    continued = server.ask(longer)
    assert continued.device == 704, "whole pages of the conversation so far"
    assert largest_difference(continued, server.recompute(longer)) <= TOLERANCE
    server.flush_device()
    with server.switched_on("corrupt_restored_key"):
        assert largest_difference(server.ask(prompt, tokens=20), recomputed) > TOLERANCE
    server.forget_everything()


def assert_many_at_once(server: TierServer) -> None:
    """More prompts than the pool holds, so that pages are evicted, restored, freed and used again."""
    prompts = [random_prompt(100 + index, 900 - 37 * index) for index in range(6)]
    references = [server.recompute(prompt, tokens=4) for prompt in prompts]
    order = [*range(6), *range(0, 6, 2), *range(6)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda index: server.ask(prompts[index], tokens=4), order))
    for index, answer in zip(order, answers, strict=True):
        assert largest_difference(answer, references[index]) <= TOLERANCE
    assert any(answer.host for answer in answers)


def test_pages_of_16_with_the_hooks(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with server_for(tmp_path, tiny_model(family="phi"), 16) as server:
        assert server.hooked_functions(installed_sglang()) >= ATTENTION | ALLOCATION | RANKS
        assert_restored_equals_recomputed(server)
        assert_many_at_once(server)
        server.assert_nothing_left()


def test_the_patched_sglang(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The first two patches are needed here: attention, and pages."""
    packages = tmp_path / "packages"
    packages.mkdir()
    write_patched_sglang(packages)
    model = tiny_model(family="qwen3", kv_heads=2)
    with server_for(tmp_path, model, 16, [packages]) as server:
        hooked = server.hooked_functions(packages / "sglang")
        assert "get_internal_state" in hooked
        assert not hooked & (ATTENTION | ALLOCATION | RANKS), "nothing to fix there"
        assert_restored_equals_recomputed(server)
        server.assert_nothing_left()
