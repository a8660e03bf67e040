"""An FP8 KV cache: K and V come back as the bytes that they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import TierServer, assert_same_bytes, largest_difference, random_prompt
from tests.e2e.test_plans import write_profile

WHOLE = 896  # of 900 tokens, in whole chunks


def test_an_fp8_cache(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, costs = tiny_model(), tmp_path / "costs.json"
    # Hidden states would be cheapest, and restoring always pays.
    write_profile(model, costs, fixed=1, hidden=1, kv=2, project=0.1, run=1000, kv_dtype_bytes=1)
    arguments = [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "4096"),
        *("--hcache-profile", str(costs)),
        *("--kv-cache-dtype", "fp8_e4m3", "--hcache-method", "auto", "--enable-cache-report"),
        *("--hcache-dirs", str(tmp_path / "disk"), "--hcache-disk-size", "1GB"),
        *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
    ]
    prompt = random_prompt(1, 900)
    with TierServer(tmp_path, arguments) as server:
        assert set(server.state()["layers"]) == {"kv"}
        computed = server.ask(prompt, rid="probe-computed")
        expected = server.probe("computed")
        assert {each.dtype for each in expected.values()} == {torch.uint8}
        server.to_tiers()
        restored = server.ask(prompt, rid="probe-restored")
        assert (restored.device, restored.restored) == (0, WHOLE)
        assert_same_bytes(server.probe("restored"), expected, WHOLE)
        assert restored.tokens == computed.tokens
        # Four tokens of the prompt are computed in another pass, and what is rounded there may fall to the other side.
        assert largest_difference(restored, computed) <= 0.05
        server.flush_device()
        with server.switched_on("corrupt_restored_key"):
            wrong = server.ask(prompt, rid="probe-wrong")
        assert wrong.restored == WHOLE
        with pytest.raises(AssertionError):
            assert_same_bytes(server.probe("wrong"), expected, WHOLE)
        server.assert_nothing_left()
