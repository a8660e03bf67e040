"""One real server with host and disk tier: what it restores equals what it would recompute.

It stores K and V of all layers, and those of decoded tokens later: what servers on a CPU do where nothing says
otherwise.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.harness import TOLERANCE, Answer, TierServer, largest_difference, random_prompt, wait_for

POOL_TOKENS = 4096
THINKS = ("--reasoning-parser", "qwen3", "--strip-thinking-cache")
"""Without effect on requests that do not think."""


def tier_arguments(model: Path, folder: Path) -> list[str]:
    config = folder / "hcache.yaml"
    # What is saved and restored must not depend on how much else the machine has to do.
    config.write_text("staging_size: 12MB\nrestore_deadline_s: 120\n")
    return [
        *("--model-path", str(model), "--dtype", "float32"),
        *("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "512"),
        *("--enable-cache-report", "--enable-metrics", "--hcache-method", "kv"),
        *("--hcache-config", str(config), "--hcache-dirs", str(folder / "store")),
        *("--hcache-disk-size", "1GB", "--hcache-disk-free-floor", "100MB"),
        *("--hcache-host-size", "32MB"),  # about 60 chunks: less than the tests use, so the disk is needed
    ]


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    folder = tmp_path_factory.mktemp("serving")
    arguments = [*tier_arguments(tiny_model(kv_heads=2), folder), *THINKS]
    with TierServer(folder, arguments, sleep_on_idle=False) as running:
        yield running
        running.assert_nothing_left()


def test_restored_from_host_equals_recomputed(server: TierServer) -> None:
    prompt = random_prompt(1, 900)  # over the chunked-prefill size: captured from two forward passes
    reference = server.recompute(prompt, rid="probe-host-recomputed")
    server.ask(prompt)
    server.to_tiers()
    restored = server.ask(prompt, rid="probe-host-restored")
    assert (restored.restored, restored.device) == (896, 0)
    assert restored.host > 0
    assert largest_difference(restored, reference) <= TOLERANCE
    assert_same_pool(server, "host-restored", "host-recomputed")


def test_restored_from_disk_equals_recomputed(server: TierServer) -> None:
    prompt = random_prompt(2, 700)
    reference = server.recompute(prompt, rid="probe-disk-recomputed")
    server.ask(prompt)
    push_to_disk(server, seed=20)
    restored = server.ask(prompt, rid="probe-disk-restored")
    assert (restored.disk, restored.host, restored.device) == (640, 0, 0)
    assert largest_difference(restored, reference) <= TOLERANCE
    assert_same_pool(server, "disk-restored", "disk-recomputed")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_equality_tests_notice_a_wrong_key(server: TierServer, tier: str) -> None:
    seed = {"host": 3, "disk": 4}[tier]
    prompt = random_prompt(seed, 700)
    reference = server.recompute(prompt, rid=f"probe-{tier}-right")
    server.ask(prompt)
    server.to_tiers()
    if tier == "disk":
        push_to_disk(server, seed=30)
    with server.switched_on("corrupt_restored_key"):
        wrong = server.ask(prompt, rid=f"probe-{tier}-wrong")
    assert wrong.restored == 640
    assert largest_difference(wrong, reference) > TOLERANCE
    with pytest.raises(AssertionError):
        assert_same_pool(server, f"{tier}-wrong", f"{tier}-right")
    server.flush_device()  # the damaged prefix must not serve the tests that follow


def test_a_conversation_restores_what_was_decoded(server: TierServer) -> None:
    history = random_prompt(5, 300)
    for turn in range(3):
        answer = server.ask(history, tokens=100)
        assert largest_difference(server.recompute(history, tokens=100), answer) <= TOLERANCE
        if turn:
            # The chunks that the answer of the turn before filled during decoding came back too.
            assert answer.restored == len(history[:-1]) // 64 * 64 - missing_tail(history)
        history = [*history, *answer.tokens, *random_prompt(50 + turn, 80)]
        server.to_tiers()
    with server.switched_on("corrupt_restored_key"):
        wrong = server.ask(history)
    assert wrong.restored
    assert largest_difference(wrong, server.recompute(history)) > TOLERANCE
    server.forget_everything()


def test_a_conversation_goes_on_inside_of_a_chunk(server: TierServer) -> None:
    """What a turn left on the device is used to the last token, and saved without a gap."""
    history, on_device = random_prompt(7, 300), 0
    for turn in range(3):
        answer = server.ask(history, tokens=50)
        assert largest_difference(server.recompute(history, tokens=50), answer) <= TOLERANCE
        assert answer.device == on_device, "all but the last token of the turn before"
        on_device = len(history) + 50 - 1
        history = [*history, *answer.tokens, *random_prompt(70 + turn, 30)]
        server.settle()
    assert_saved_without_a_gap(server, history[:on_device])


@pytest.mark.parametrize(("thinks", "restored"), [(False, 320), (True, 192)])
def test_of_a_request_that_thinks_only_the_prompt_is_kept(
    server: TierServer, thinks: bool, restored: int
) -> None:
    """``--strip-thinking-cache``: on the device, and so in the tiers."""
    prompt = random_prompt(9, 200)
    answer = server.ask(prompt, tokens=150, require_reasoning=thinks)
    conversation = [*prompt, *answer.tokens]
    reference = server.recompute(conversation)
    server.to_tiers()
    returned = server.ask(conversation)
    assert (returned.restored, returned.device) == (restored, 0)
    assert largest_difference(returned, reference) <= TOLERANCE
    server.forget_everything()


def test_requests_that_share_a_prompt_that_ends_inside_of_a_chunk(server: TierServer) -> None:
    system = random_prompt(8, 100)
    prompts = [[*system, *random_prompt(80 + index, 150)] for index in range(3)]
    for index, prompt in enumerate(prompts):
        assert server.ask(prompt).device == (100 if index else 0)
        server.settle()
    for prompt in prompts:
        assert_saved_without_a_gap(server, prompt)


def assert_saved_without_a_gap(server: TierServer, tokens: list[int]) -> None:
    """Once the device has lost them, all whole chunks of ``tokens`` come back, as they were."""
    server.flush_device()
    reference = server.recompute([*tokens, 1])
    restored = server.ask([*tokens, 1])
    assert restored.restored == len(tokens) // 64 * 64
    assert largest_difference(restored, reference) <= TOLERANCE
    server.flush_device()
    with server.switched_on("corrupt_restored_key"):
        assert largest_difference(server.ask([*tokens, 1]), reference) > TOLERANCE
    server.flush_device()


def missing_tail(history: list[int]) -> int:
    """Whole chunks at the end of a turn's prompt that nobody has computed: they reach into the new question."""
    computed = len(history) - 80 - 1  # the last generated token's state is never computed
    return len(history[:-1]) // 64 * 64 - computed // 64 * 64


def test_many_requests_at_once(server: TierServer) -> None:
    """Concurrency 16 with a pool that holds 4 of 16 contexts: 300 requests, none wrong, none failed."""
    prompts = [random_prompt(100 + index, 1000 - 7 * index) for index in range(16)]
    references = [server.recompute(prompt) for prompt in prompts]
    done_before = server.counter("restore.done")
    weights = [1 / (index + 1) for index in range(len(prompts))]
    order = random.Random(0).choices(range(len(prompts)), weights=weights, k=300)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda index: (index, server.ask(prompts[index])), order))
    assert len(answers) == 300
    for index, answer in answers:
        assert largest_difference(answer, references[index]) <= TOLERANCE, f"prompt {index}: {answer}"
    assert any(answer.host for _, answer in answers)
    assert any(answer.disk for _, answer in answers)
    assert server.counter("restore.done") - done_before >= 20
    server.assert_nothing_left()
    with server.switched_on("corrupt_restored_key"), ThreadPoolExecutor(16) as threads:
        damaged = list(threads.map(lambda index: (index, server.ask(prompts[index])), order[:48]))
    assert any(largest_difference(answer, references[index]) > TOLERANCE for index, answer in damaged)
    server.forget_everything()


def test_aborts_in_the_middle_of_restores(server: TierServer) -> None:
    prompts = [random_prompt(200 + index, 600) for index in range(6)]
    references = [server.recompute(prompt) for prompt in prompts]
    for prompt in prompts:
        server.ask(prompt)
    server.to_tiers()
    cancelled_before = server.counter("restore.cancelled")
    with server.switched_on("hold_restore"):  # else all may be over before they are aborted
        threads = [
            threading.Thread(target=ask_and_expect_abort, args=(server, prompt, f"abort-{index}"))
            for index, prompt in enumerate(prompts)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.state()["in_flight_tokens"] > 0, "a restore to run")
        wait_for(lambda: sum(server.state()["requests"].values()) == len(prompts), "all to wait for theirs")
        for index in range(len(prompts)):
            server.post("/abort_request", {"rid": f"abort-{index}"})
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    wait_for(lambda: server.counter("restore.cancelled") > cancelled_before, "a restore to be cancelled")
    server.assert_nothing_left()
    for prompt, reference in zip(prompts, references, strict=True):
        assert largest_difference(server.ask(prompt), reference) <= TOLERANCE


def ask_and_expect_abort(server: TierServer, prompt: list[int], rid: str) -> None:
    body = {"input_ids": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_aborts_of_running_requests_leave_nothing(server: TierServer) -> None:
    prompts = [random_prompt(300 + index, 400) for index in range(4)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(server.leave_after_the_first_token, prompts))
    server.assert_nothing_left()


def test_retracted_requests(server: TierServer) -> None:
    """Decoding outgrows the pool, SGLang retracts requests and prefills them again, with the tier in between.

    They come back so soon that they fill chunks afterwards.
    """
    prompts = [random_prompt(400 + index, 400) for index in range(8)]
    with ThreadPoolExecutor(4) as threads:
        references = list(threads.map(lambda prompt: server.recompute(prompt, tokens=310), prompts))
    assert not any(reference.retractions for reference in references)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: server.ask(prompt, tokens=310), prompts))
    retracted = next(index for index, answer in enumerate(answers) if answer.retractions)
    for answer, reference in zip(answers, references, strict=True):
        assert largest_difference(answer, reference) <= TOLERANCE
    server.assert_nothing_left()
    server.settle()
    history = [*prompts[retracted], *answers[retracted].tokens[:-1]]
    restored = server.ask(history)
    assert restored.restored == len(history[:-1]) // 64 * 64
    reference = server.recompute(history)
    assert largest_difference(restored, reference) <= TOLERANCE
    server.flush_device()
    with server.switched_on("corrupt_restored_key"):
        assert largest_difference(server.ask(history), reference) > TOLERANCE
    server.forget_everything()


def test_a_running_request_takes_the_room_of_a_restore(server: TierServer) -> None:
    """Else SGLang, which finds nothing to evict, would end it for want of memory."""
    history = random_prompt(9, 3400)
    reference = server.recompute(history)
    server.ask(history)
    server.to_tiers()
    stopped = server.counter("restore.stopped_for_room")
    with ThreadPoolExecutor(2) as threads:
        with server.switched_on("linger_restore"):
            with server.switched_on("slow_passes"):  # else it may be over before the restore begins
                running = threads.submit(server.ask, random_prompt(90, 64), tokens=760)
                wait_for(lambda: server.state()["captured_requests"] > 0, "a request to run")
                returning = threads.submit(server.ask, history)
                wait_for(lambda: server.state()["in_flight_tokens"] > 0, "a restore beside it")
            assert running.result(120).retractions == 0
        assert server.counter("restore.stopped_for_room") > stopped
        yielded = r'sglang:hcache_restores_yielded_total{.*what="running".*} ([0-9.]+)'
        metrics = httpx.get(server.process.url + "/metrics", timeout=30, trust_env=False).text
        assert sum(map(float, re.findall(yielded, metrics))) == server.counter("restore.stopped_for_room")
        restored = returning.result(120)
    assert restored.restored == 3392
    assert largest_difference(restored, reference) <= TOLERANCE
    server.flush_device()


def test_what_is_restored_runs_although_a_prompt_before_found_no_room(server: TierServer) -> None:
    """SGLang looks for room again only when a request ends."""
    history = random_prompt(10, 600)
    server.ask(history)
    server.to_tiers()
    over: list[Future[Answer]] = []
    with ThreadPoolExecutor(3) as threads:
        with server.switched_on("slow_passes"):  # else the first may be over before what waits behind it
            with server.switched_on("linger_restore"):
                running = threads.submit(server.ask, random_prompt(91, 64), tokens=700)
                wait_for(lambda: server.state()["captured_requests"] > 0, "a request to run")
                returning = threads.submit(server.ask, history)
                wait_for(lambda: server.state()["requests"]["running"] == 1, "its restore to run")
                large = threads.submit(server.ask, random_prompt(92, 3400))
                wait_for(lambda: server.state()["requests"]["resolved"] == 1, "a large prompt to wait")
                for each in (running, large, returning):
                    each.add_done_callback(over.append)
                time.sleep(0.5)
            assert returning.result(120).restored == 576
        assert running.result(120).retractions == large.result(120).retractions == 0
    assert over[0] is returning
    server.flush_device()


def test_a_failed_restore_is_recomputed(server: TierServer) -> None:
    prompt = random_prompt(6, 600)
    reference = server.recompute(prompt)
    server.ask(prompt)
    server.to_tiers()
    with server.switched_on("fail_read"):
        answer = server.ask(prompt)
    assert answer.restored == 0
    assert largest_difference(answer, reference) <= TOLERANCE
    server.assert_nothing_left()


def test_metrics_show_the_host_tier(server: TierServer) -> None:
    metrics = httpx.get(server.process.url + "/metrics", timeout=30, trust_env=False).text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("sglang:hicache_host")
    }
    assert values["sglang:hicache_host_total_tokens"] == server.state()["host"]["slots"] * 64
    assert 0 <= values["sglang:hicache_host_used_tokens"] <= values["sglang:hicache_host_total_tokens"]


def test_flushing_keeps_the_tiers_and_clearing_empties_them(server: TierServer) -> None:
    prompt = random_prompt(8, 400)
    server.ask(prompt)
    server.to_tiers()
    assert server.ask(prompt).restored == 384
    server.flush_device()
    assert server.post("/clear_hicache_storage_backend").status_code == 200
    server.settle()
    state = server.state()
    assert state["disk"]["chunks"] == state["host"]["clean"] == state["host"]["dirty"] == 0
    assert server.ask(prompt).cached == 0


def push_to_disk(server: TierServer, seed: int) -> None:
    """Fill the host tier with other chunks, so that everything before is on disk only."""
    server.settle()
    for index in range(8):
        server.ask(random_prompt(seed * 100 + index, 900), tokens=1)
        time.sleep(0.02)
    server.to_tiers()
    server.settle()


def assert_same_pool(server: TierServer, one: str, other: str) -> None:
    """K and V of two requests' prompts are equal but for rounding (the last token's is computed in both)."""
    left, right = server.probe(one), server.probe(other)
    for name in ("k", "v"):
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-4)
