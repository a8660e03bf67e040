"""LoRA adapters: K and V of each come back to its own requests alone, by what its files hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.harness import (
    TOLERANCE,
    Answer,
    TierServer,
    assert_same_bytes,
    largest_difference,
    random_prompt,
)
from tests.e2e.test_plans import write_profile
from tests.patched_sglang import write_patched_sglang

WHOLE = 896  # of 900 tokens, in whole chunks
PROMPT = random_prompt(1, 900)
RANK = 8
NAMES: tuple[str | None, ...] = (None, "one", "two")


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """In PEFT's format, strong enough that answers are others with it than without."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": 0.05
        * torch.randn(*((RANK, hidden) if side == "A" else (hidden, RANK)), generator=generator)
        for layer in range(layers)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for side in "AB"
    }
    folder.mkdir(exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8 * RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


class Setting:
    """Starts servers over the same disk tier and the same adapters' folders.

    SGLang 0.5.17 serves adapters on a CPU only with our patches.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self.model = model
        self.adapters = {
            name: write_adapter(folder / name, model, seed) for seed, name in enumerate(NAMES) if name
        }
        self._packages = folder / "packages"
        self._packages.mkdir()
        write_patched_sglang(self._packages)
        costs = folder / "costs.json"
        # Without adapters, auto would store hidden states; and restoring always pays.
        write_profile(model, costs, fixed=1, hidden=1, kv=2, project=0.1, run=1000)
        self._auto = ("--hcache-method", "auto", "--hcache-profile", str(costs))

    def server(self, name: str, ranks: int = 1) -> TierServer:
        return TierServer(
            self._folder / name,
            [
                *("--tp-size", str(ranks)),
                *("--model-path", str(self.model), "--dtype", "float32", "--max-total-tokens", "4096"),
                *(self._auto if ranks == 1 else ("--hcache-method", "kv")),
                "--enable-cache-report",
                *("--hcache-dirs", str(self._folder / f"disk-{ranks}"), "--hcache-disk-size", "1GB"),
                *("--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
                *("--lora-backend", "torch_native", "--max-loras-per-batch", "2", "--lora-paths"),
                *(f"{name}={path}" for name, path in self.adapters.items()),
            ],
            packages=[self._packages],
        )


@pytest.fixture(scope="module")
def setting(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("adapters"), tiny_model())


@pytest.fixture(scope="module")
def first(setting: Setting) -> Iterator[TierServer]:
    with setting.server("first") as server:
        yield server


def ask(server: TierServer, adapter: str | None, prompt: list[int] = PROMPT, **fields: Any) -> Answer:
    return server.ask(prompt, lora_path=adapter, **fields)


def load_again(server: TierServer, name: str, new_name: str, folder: Path) -> None:
    assert server.post("/unload_lora_adapter", {"lora_name": name}).status_code == 200
    load = {"lora_name": new_name, "lora_path": str(folder)}
    assert server.post("/load_lora_adapter", load).status_code == 200


def test_each_gets_its_own_back(first: TierServer) -> None:
    assert set(first.state()["layers"]) == {"kv"}
    assert "LoRA adapters (--enable-lora) change what K and V are projected with" in first.process.log_text()
    computed = {name: ask(first, name, rid=f"probe-computed-{name}") for name in NAMES}
    for answer in computed.values():
        assert answer.cached == 0, "another's"
    for one, other in combinations(computed.values(), 2):
        assert largest_difference(one, other) > TOLERANCE
    first.to_tiers()
    for name in NAMES:
        restored = ask(first, name, rid=f"probe-restored-{name}")
        assert (restored.device, restored.restored) == (0, WHOLE)
        assert restored.tokens == computed[name].tokens
        expected = first.probe(f"computed-{name}")
        assert_same_bytes(first.probe(f"restored-{name}"), expected, WHOLE)


def test_wrong_bytes_would_be_seen(first: TierServer) -> None:
    prompt = random_prompt(5, 400)
    ask(first, "one", prompt, rid="probe-right")
    first.to_tiers()
    with first.switched_on("corrupt_restored_key"):
        assert ask(first, "one", prompt, rid="probe-wrong").restored == 384
    with pytest.raises(AssertionError):
        assert_same_bytes(first.probe("wrong"), first.probe("right"), 384)
    first.flush_device()


def test_a_tenant_with_an_adapter(first: TierServer) -> None:
    prompt = random_prompt(2, 400)
    ask(first, "one", prompt, extra_key="somebody")
    first.to_tiers()
    assert ask(first, "one", prompt).cached == 0
    assert ask(first, "two", prompt, extra_key="somebody").cached == 0
    assert ask(first, "one", prompt, extra_key="somebody").restored == 384


def test_nobody_poses_as_an_adapter(first: TierServer, setting: Setting) -> None:
    """SGLang appends an adapter's id to ``extra_key``; that of an adapter from ``--lora-paths`` can be worked out."""
    lora_id = uuid5(NAMESPACE_URL, f"two\0{setting.adapters['two']}").hex
    prompt = random_prompt(4, 400)
    ask(first, None, prompt, extra_key=lora_id)
    assert ask(first, "two", prompt).cached == 0
    first.to_tiers()
    assert ask(first, None, prompt, extra_key=lora_id).cached == 0
    assert ask(first, "two", prompt).restored == 384


def test_loaded_again(first: TierServer, setting: Setting) -> None:
    """Under another name, and another adapter under the same."""
    prompt = random_prompt(3, 400)
    computed = ask(first, "one", prompt)
    assert computed.cached == 0
    first.to_tiers()
    load_again(first, "one", "uno", setting.adapters["one"])
    again = ask(first, "uno", prompt)
    assert (again.restored, again.tokens) == (384, computed.tokens)
    other = write_adapter(setting.adapters["one"].with_name("other"), setting.model, 77)
    load = {"lora_name": "one", "lora_path": str(other)}
    assert first.post("/load_lora_adapter", load).status_code == 200
    assert ask(first, "one", prompt).cached == 0


def test_many_at_once(first: TierServer) -> None:
    """More adapters than a batch takes, and more KV than the pool holds."""
    wanted = [
        (name, random_prompt(100 + index, 900 - 37 * index))
        for index in range(3)
        for name in (None, "two", "uno")
    ]
    references = [first.recompute(prompt, lora_path=name, tokens=4) for name, prompt in wanted]
    order = [*range(len(wanted)), *range(0, len(wanted), 2), *range(len(wanted))]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda index: ask(first, *wanted[index], tokens=4), order))
    for index, answer in zip(order, answers, strict=True):
        assert largest_difference(answer, references[index]) <= TOLERANCE
    assert any(answer.host for answer in answers)
    first.assert_nothing_left()


def test_after_a_restart(first: TierServer, setting: Setting) -> None:
    """From disk. SGLang gives an adapter of the same name and path the same id, whatever its files hold by then."""
    computed = ask(first, "two")
    assert computed.tokens == first.recompute(PROMPT, lora_path="two").tokens
    first.settle()
    first.process.stop()
    write_adapter(setting.adapters["one"], setting.model, 78)
    with setting.server("second") as server:
        assert ask(server, "one").cached == 0, "of the adapter that was there before"
        again = ask(server, "two")
        assert (again.device, again.disk) == (0, WHOLE)
        assert largest_difference(again, computed) <= TOLERANCE
        assert ask(server, None).disk == WHOLE
        server.assert_nothing_left()


def test_two_ranks(setting: Setting) -> None:
    """Each has its part of an adapter as well."""
    with setting.server("two-ranks", ranks=2) as server:
        computed = {name: ask(server, name) for name in NAMES}
        for one, other in combinations(computed.values(), 2):
            assert largest_difference(one, other) > TOLERANCE
        server.to_tiers()
        for name, expected in computed.items():
            restored = ask(server, name)
            assert (restored.device, restored.restored) == (0, WHOLE)
            assert largest_difference(restored, expected) <= TOLERANCE
        server.to_tiers()
        with server.switched_on("corrupt_restored_key", "1"):
            assert largest_difference(ask(server, "one"), computed["one"]) > TOLERANCE
        server.flush_device()
        load_again(server, "one", "uno", setting.adapters["one"])
        restored = ask(server, "uno")
        assert restored.restored == WHOLE
        assert largest_difference(restored, computed["one"]) <= TOLERANCE
        load = {"lora_name": "one", "lora_path": str(setting.adapters["one"])}
        for rank, told in ((0, "injected"), (1, "none keeps it (rank 1: injected")):
            with server.switched_on("fail_adapter", f"{rank}"):
                refused = server.post("/load_lora_adapter", load)
            assert (refused.status_code, told in refused.text) == (400, True)
        assert server.post("/load_lora_adapter", load).status_code == 200
        assert ask(server, "one").restored == WHOLE
        server.assert_nothing_left()
