"""Quantised weights: K and V come back as they were, also to the next server with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.harness import TierServer, assert_same_bytes, random_prompt
from tests.e2e.test_plans import write_profile

WHOLE = 896  # of 900 tokens, in whole chunks


def values_of_the_first_layer(model: Path, prompt: list[int]) -> torch.Tensor:
    """V of ``prompt`` with the weights of the checkpoint: (tokens, heads, head_dim)."""
    weights, layer = load_file(model / "model.safetensors"), "model.layers.0"
    rows = weights["model.embed_tokens.weight"][prompt]
    rows = (
        rows
        * (rows.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        * weights[f"{layer}.input_layernorm.weight"]
    )
    return (rows @ weights[f"{layer}.self_attn.v_proj.weight"].T).view(len(prompt), -1, 64)


def test_quantised_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eight bits by torchao: the one way of quantising that SGLang runs on any CPU."""
    monkeypatch.setenv("HCACHE_TEST_TORCHAO", "1")
    model, costs = tiny_model(), tmp_path / "costs.json"
    # Without quantised weights, auto would store hidden states; and restoring always pays.
    write_profile(model, costs, fixed=1, hidden=1, kv=2, project=0.1, run=1000)
    arguments = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--hcache-profile", str(costs)),
        *("--torchao-config", "int8wo", "--hcache-method", "auto", "--enable-cache-report"),
        *("--hcache-dirs", str(tmp_path / "disk"), "--hcache-disk-size", "1GB"),
        *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
    ]
    prompt = random_prompt(1, 900)
    plain = values_of_the_first_layer(model, prompt)
    with TierServer(tmp_path / "first", arguments) as server:
        assert set(server.state()["layers"]) == {"kv"}
        assert "weights are quantised (torchao int8wo)" in server.process.log_text()
        computed = server.ask(prompt, rid="probe-computed")
        expected = server.probe("computed")
        rounded = (expected["v"][0] - plain).abs().max() / plain.abs().max()
        assert 1e-3 < rounded < 0.05, "the weights are quantised"
        server.to_tiers()
        restored = server.ask(prompt, rid="probe-restored")
        assert (restored.device, restored.restored) == (0, WHOLE)
        assert restored.tokens == computed.tokens
        assert_same_bytes(server.probe("restored"), expected, WHOLE)
        server.flush_device()
        with server.switched_on("corrupt_restored_key"):
            server.ask(prompt, rid="probe-wrong")
        with pytest.raises(AssertionError):
            assert_same_bytes(server.probe("wrong"), expected, WHOLE)
        server.assert_nothing_left()
        server.process.stop()
    with TierServer(tmp_path / "second", arguments) as server:
        again = server.ask(prompt, rid="probe-again")
        assert (again.device, again.disk) == (0, WHOLE)
        assert again.tokens == computed.tokens
        assert_same_bytes(server.probe("again"), expected, WHOLE)
