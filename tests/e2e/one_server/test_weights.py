"""Weights that change while the server runs: nothing of before comes back, what comes back is right, it stays up."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt, wait_for

CHANGED = ("model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.v_proj.weight")
"""What an update from tensors changes; all other weights stay."""

Load = Callable[[int], None]


def from_disk(server: TierServer, folder: Path, **more: Any) -> None:
    server.internal_state()  # SGLang ends if it is told to flush in the round in which it has sent the last answer
    response = server.post("/update_weights_from_disk", {"model_path": str(folder), **more})
    assert response.json()["success"], response.text


def from_tensors(server: TierServer, folder: Path, **more: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    data = pickle.dumps([(name, weights[name]) for name in CHANGED])
    server.internal_state()
    body = {"serialized_named_tensors": [base64.b64encode(data).decode()], **more}
    response = server.post("/update_weights_from_tensor", body)
    assert response.json()["success"], response.text


@pytest.fixture
def models(server: TierServer, tiny_model: Callable[..., Path]) -> Iterator[tuple[Path, Path]]:
    """The served model and another of its shape. Afterwards the first one is served."""
    folders = tiny_model(), tiny_model(seed=1)
    yield folders
    from_disk(server, folders[0])


def differs(one: Answer, other: Answer) -> bool:
    return largest_difference(one, other) > 0.1


@pytest.mark.parametrize("update", [from_disk, from_tensors])
def test_new_weights(
    server: TierServer, models: tuple[Path, Path], update: Callable[[TierServer, Path], None]
) -> None:
    first, second = models
    prompt = random_prompt(1, 400)
    old = server.ask(prompt)
    server.settle()
    namespace, written = server.state()["namespace"], server.counter("demote.chunks_written")
    update(server, second)
    assert server.state()["namespace"] is None, "not known before somebody asks"
    new = server.ask(prompt)
    server.settle()
    assert server.counter("demote.chunks_written") == written, "what old weights left is not worth a write"
    assert server.counter("host.chunks_outdated") >= 6
    assert new.cached == 0
    assert differs(new, old)
    assert server.state()["namespace"] not in (None, namespace)
    server.to_tiers()
    restored = server.ask(prompt)
    assert restored.restored == 384
    assert largest_difference(restored, new) <= TOLERANCE, "projected with the new weights"
    server.settle()
    update(server, first)
    again = server.ask(prompt)  # what belongs to these weights serves again
    assert again.restored == 384
    assert largest_difference(again, old) <= TOLERANCE
    assert server.state()["namespace"] == namespace


@pytest.mark.parametrize("update", [from_disk, from_tensors])
def test_nothing_is_saved_behind_old_kv_on_the_device(
    server: TierServer, models: tuple[Path, Path], update: Callable[..., None]
) -> None:
    """``flush_cache=False`` keeps KV of the old weights on the device, and SGLang goes on from there."""
    prompt, more = random_prompt(2, 400), random_prompt(3, 300)
    server.ask(prompt)
    update(server, models[1], flush_cache=False)
    assert server.state()["nothing_saved"] is None, "nobody knows yet"
    mixed = server.ask([*prompt, *more])
    assert mixed.device == 400
    assert server.state()["nothing_saved"] == "old_weights"
    reference = server.recompute([*prompt, *more])
    assert differs(mixed, reference)
    server.to_tiers()
    for restored in (0, 640):
        right = server.ask([*prompt, *more])
        assert right.cached == restored
        assert largest_difference(right, reference) <= TOLERANCE
        server.to_tiers()


def test_nothing_is_saved_of_a_request_that_old_kv_slips_under(
    server: TierServer, models: tuple[Path, Path]
) -> None:
    """With logprobs of all its prompt it starts on no prefix; SGLang puts the tree's KV under its first piece."""
    prompt, more = random_prompt(13, 400), random_prompt(14, 300)
    server.ask(prompt)
    from_disk(server, models[1], flush_cache=False)
    server.ask([*prompt, *more], logprob_start_len=0)
    reference = server.recompute([*prompt, *more])
    server.to_tiers()
    right = server.ask([*prompt, *more])
    assert largest_difference(right, reference) <= TOLERANCE
    assert right.cached == 0


def test_behind_new_kv_on_a_device_that_was_empty_all_is_saved(
    server: TierServer, models: tuple[Path, Path]
) -> None:
    """Flushed before an update that flushes nothing."""
    prompt, more = random_prompt(11, 400), random_prompt(12, 300)
    server.ask(prompt)
    server.flush_device()
    from_disk(server, models[1], flush_cache=False)
    server.ask(prompt)
    server.settle()  # else its last 16 tokens may not be there yet to be saved again, and are computed anew
    whole = server.ask([*prompt, *more])
    assert whole.device == 400
    server.to_tiers()
    again = server.ask([*prompt, *more])
    assert again.restored == 640
    assert largest_difference(again, whole) <= TOLERANCE


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_that_run_or_restore_meanwhile(
    server: TierServer, models: tuple[Path, Path], mode: str
) -> None:
    """How trainers update: generation is paused, weights are replaced under the requests, generation goes on."""
    decoded, waiting = random_prompt(4, 300), random_prompt(5, 600)
    server.ask(waiting)
    server.to_tiers()
    with ThreadPoolExecutor(2) as threads:
        with server.switched_on("hold_restore"), server.switched_on("slow_passes"):
            running = threads.submit(server.ask, decoded, tokens=400)
            wait_for(lambda: server.state()["captured_requests"] > 0, "a decoding request")
            restoring = threads.submit(server.ask, waiting)
            wait_for(lambda: server.state()["in_flight_tokens"] > 0, "a restore")
            server.post("/pause_generation", {"mode": mode})
            server.state()  # the scheduler answers it behind the pause, for whose beginning SGLang does not wait
        from_disk(server, models[1], flush_cache=False)
        server.post("/continue_generation", {"torch_empty_cache": False})
        answers = [result_of(running), result_of(restoring)]
    server.assert_nothing_left()
    assert answers[1].restored == 0
    assert largest_difference(answers[1], server.recompute(waiting)) <= TOLERANCE
    # Of the other request a part was computed with the old weights, and nobody knows which: nothing is saved of it.
    history = [*decoded, *answers[0].tokens]
    reference = server.recompute(history)
    found = server.ask(history)
    assert largest_difference(found, reference) <= TOLERANCE
    assert found.restored == 0
    server.settle()
    from_disk(server, models[0])
    again = server.ask(history)
    assert again.restored >= len(decoded) // 64 * 64, "what was saved of it before belongs to the old weights"
    assert largest_difference(again, server.recompute(history)) <= TOLERANCE


def result_of(answer: Future[Answer]) -> Answer:
    return answer.result(timeout=120)


def test_an_update_that_fails(server: TierServer, models: tuple[Path, Path], tmp_path: Path) -> None:
    prompt = random_prompt(6, 400)
    old = server.ask(prompt)
    server.settle()
    response = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert not response.json()["success"]
    server.flush_device()
    again = server.ask(prompt)
    assert again.restored == 384
    assert largest_difference(again, old) <= TOLERANCE


def test_after_an_update_that_fails_requests_are_saved_as_before(
    server: TierServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """SGLang flushes nothing then. The same weights are there as before, and so KV on the device is theirs."""
    prompt, more = random_prompt(9, 400), random_prompt(10, 300)
    server.ask(prompt)
    response = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert not response.json()["success"]
    reference = server.recompute([*prompt, *more])
    assert server.ask([*prompt, *more]).device > 0
    server.to_tiers()
    again = server.ask([*prompt, *more])
    assert again.restored == 640
    assert largest_difference(again, reference) <= TOLERANCE


def test_weights_that_are_overwritten_by_the_checker(server: TierServer, models: tuple[Path, Path]) -> None:
    """A tool of SGLang's for those who write trainers. It tells no cache of it. Most of its actions need a GPU."""
    prompt = random_prompt(7, 400)
    server.ask(prompt)
    server.settle()
    assert server.post("/weights_checker", {"action": "snapshot"}).json()["success"]
    assert server.state()["namespace"] is not None, "nothing changed"
    assert server.post("/weights_checker", {"action": "reset_tensors"}).json()["success"]
    server.flush_device()
    assert server.ask(prompt).cached == 0


def test_weights_that_go_away_and_come_back(server: TierServer, models: tuple[Path, Path]) -> None:
    prompt = random_prompt(8, 400)
    old = server.ask(prompt)
    server.settle()
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert server.state()["namespace"] is None, "nobody reads weights that are away"
    assert server.post("/resume_memory_occupation", {}).status_code == 200
    from_disk(server, models[0])
    again = server.ask(prompt)
    assert again.restored == 384
    assert largest_difference(again, old) <= TOLERANCE
