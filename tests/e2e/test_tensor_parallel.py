"""Two ranks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import TOLERANCE, TierServer, largest_difference, random_prompt
from tests.patched_sglang import installed_sglang

TOKENS = 24


def server_of(ranks: int, model: Path, folder: Path) -> TierServer:
    """Without the tier. The ranks share the cores as ``hcache serve`` has it."""
    return TierServer(
        folder,
        [
            *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "3072"),
            *("--hierarchical-cache", "off", "--hcache-cpu-fixes", "--tp-size", str(ranks)),
        ],
    )


def test_two_ranks_answer_as_one_without_the_tier(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(kv_heads=2)
    prompts = [random_prompt(seed, 400) for seed in range(3)]
    with server_of(1, model, tmp_path / "one") as one:
        expected = [one.ask(prompt, tokens=TOKENS) for prompt in prompts]
    assert len({answer.tokens for answer in expected}) == len(prompts), "else equality would show little"
    with server_of(2, model, tmp_path / "two") as two:
        assert "init_model_parallel_group" in two.hooked_functions(installed_sglang())
        assert " TP1]" in two.process.log_text()
        answers = [two.ask(prompt, tokens=TOKENS) for prompt in prompts]
        again = two.ask(prompts[0], tokens=TOKENS)
        assert again.device == 399
        for answer, reference in zip([*answers, again], [*expected, expected[0]], strict=True):
            assert largest_difference(answer, reference) <= TOLERANCE
