"""Two ranks on a CPU, each with its part of K and V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt
from tests.patched_sglang import installed_sglang

TOKENS = 24


WITHOUT_TIER = ("--hierarchical-cache", "off", "--hcache-cpu-fixes")


def server_of(ranks: int, model: Path, folder: Path, *more: str) -> TierServer:
    """The ranks share the cores as ``hcache serve`` has it."""
    arguments = ("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "3072")
    return TierServer(folder, [*arguments, "--tp-size", str(ranks), *more])


def test_two_ranks_answer_as_one_without_the_tier(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(kv_heads=2)
    prompts = [random_prompt(seed, 400) for seed in range(3)]
    with server_of(1, model, tmp_path / "one", *WITHOUT_TIER) as one:
        expected = [one.ask(prompt, tokens=TOKENS) for prompt in prompts]
    assert len({answer.tokens for answer in expected}) == len(prompts), "else equality would show little"
    with server_of(2, model, tmp_path / "two", *WITHOUT_TIER) as two:
        assert "init_model_parallel_group" in two.hooked_functions(installed_sglang())
        assert " TP1]" in two.process.log_text()
        answers = [two.ask(prompt, tokens=TOKENS) for prompt in prompts]
        again = two.ask(prompts[0], tokens=TOKENS)
        assert again.device == 399
        for answer, reference in zip([*answers, again], [*expected, expected[0]], strict=True):
            assert largest_difference(answer, reference) <= TOLERANCE


def test_both_restore_their_part_or_none(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    store, prompt = tmp_path / "store", random_prompt(7, 900)
    tier = [
        *("--hcache-method", "auto", "--hcache-dirs", str(store), "--hcache-disk-size", "400MB"),
        *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
    ]

    def is_right(answer: Answer) -> bool:
        return largest_difference(answer, expected) <= TOLERANCE

    with server_of(2, tiny_model(kv_heads=2), tmp_path, *tier) as server:
        assert server.state()["layers"] == ["kv"] * len(server.state()["layers"])
        expected = server.ask(prompt)
        assert expected.cached == 0
        with server.switched_on("always_restore"):
            server.to_tiers()
            answer = server.ask(prompt)
            assert (answer.device, answer.restored) == (0, 896)
            assert is_right(answer)
            for rank in ("0", "1"):
                server.to_tiers()
                with server.switched_on("corrupt_restored_key", rank):
                    assert not is_right(server.ask(prompt))
                server.flush_device()
                with server.switched_on("fail_read", rank):
                    answer = server.ask(prompt)
                assert answer.cached == 0, "the other one does not use its part either"
                assert is_right(answer)
        server.assert_nothing_left()
        server.settle()
        server.process.stop()
        assert server.process.log_text().count("that existed only in host memory are on disk now") == 2
        rmtree(store / "rank-1-of-2")
        server.process.start()
        with server.switched_on("always_restore"):
            answer = server.ask(prompt)
            assert answer.cached == 0, "one of them has nothing"
            assert is_right(answer)
            server.to_tiers()
            assert server.post("/clear_hicache_storage_backend").status_code == 200
            assert server.ask(prompt).cached == 0
            server.to_tiers()
            server.process.stop()
            server.process.start()
            answer = server.ask(prompt)
            assert (answer.disk, answer.device) == (896, 0)
            assert is_right(answer)
        server.assert_nothing_left()
