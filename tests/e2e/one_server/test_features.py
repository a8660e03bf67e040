"""What else the engine can do, with prefixes that come out of the tier: the same answers as without it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import TOLERANCE, TierServer, largest_difference, random_prompt, wait_for

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def in_tiers(server: TierServer, *prompts: Sequence[int]) -> None:
    """Have ``prompts`` in the tiers, and nothing on the device."""
    for prompt in prompts:
        server.ask(prompt, tokens=1)
    server.to_tiers()


def generate(server: TierServer, prompt: Sequence[int], **fields: Any) -> Any:
    """The response to a greedy request: an object, or a list of them."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True, **fields.pop("sampling", {})}
    body = {"input_ids": list(prompt), "sampling_params": sampling, **fields}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def restored_of(meta: dict[str, Any]) -> int:
    details = meta.get("cached_tokens_details") or {}
    return int(details.get("host", 0) + details.get("storage", 0))


def logprobs_of(items: Sequence[Sequence[Any]]) -> np.ndarray:
    """Logprobs of (logprob, token, text) items; the first token of a prompt has none."""
    return np.array([np.nan if item[0] is None else item[0] for item in items])


def test_hidden_states_that_a_request_asks_for(server: TierServer) -> None:
    """SGLang returns those of tokens that it computes."""
    prompt = random_prompt(2, 300)
    in_tiers(server, prompt)
    last = generate(server, prompt, return_hidden_states="last", sampling={"max_new_tokens": 1})["meta_info"]
    assert restored_of(last) == 256
    server.to_tiers()
    every = generate(server, prompt, return_hidden_states=True, sampling={"max_new_tokens": 1})["meta_info"]
    assert every["cached_tokens"] == 0
    assert len(every["hidden_states"][0]) == len(prompt)
    np.testing.assert_allclose(every["hidden_states"][0][-1], last["hidden_states"], atol=1e-4)


@pytest.mark.parametrize(("start", "restored"), [(0, 0), (63, 0), (64, 64), (300, 256), (599, 576)])
def test_logprobs_of_the_prompt(server: TierServer, start: int, restored: int) -> None:
    """Tokens whose logprobs are wanted must be computed; all before them come back."""
    prompt = random_prompt(1, 600)
    wanted = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
    expected = generate(server, prompt, extra_key="recomputed", **wanted)["meta_info"]
    in_tiers(server, prompt)
    meta = generate(server, prompt, **wanted)["meta_info"]
    assert restored_of(meta) == meta["cached_tokens"] == restored
    assert len(meta["input_token_logprobs"]) == len(prompt) - start
    np.testing.assert_allclose(all_logprobs(meta), all_logprobs(expected), atol=TOLERANCE)
    assert [[top[1] for top in tops or ()] for tops in meta["input_top_logprobs"]] == [
        [top[1] for top in tops or ()] for tops in expected["input_top_logprobs"]
    ]
    server.flush_device()
    with server.switched_on("corrupt_restored_key"):
        wrong = all_logprobs(generate(server, prompt, **wanted)["meta_info"])
    assert (np.nanmax(np.abs(wrong - all_logprobs(expected))) > TOLERANCE) == (restored > 0)


def all_logprobs(meta: dict[str, Any]) -> np.ndarray:
    """Of the prompt's and of the generated tokens."""
    return logprobs_of([*meta["input_token_logprobs"], *meta["output_token_logprobs"]])


def test_scores(server: TierServer) -> None:
    """The score API: prompts of which nothing is generated."""
    query, items = random_prompt(2, 300), [random_prompt(seed, 20) for seed in (3, 4)]

    labels = sorted(set(server.recompute([*query, *items[0]]).tokens))  # what the model may say at all

    def score() -> np.ndarray:
        body = {
            "model": "m",
            "query": query,
            "items": items,
            "label_token_ids": labels,
            "apply_softmax": True,
        }
        response = server.post("/v1/score", body)
        assert response.status_code == 200, response.text
        return np.array(response.json()["scores"])

    expected = score()
    server.to_tiers()
    before = server.counter("restore.tokens")
    np.testing.assert_allclose(score(), expected, atol=TOLERANCE)
    assert server.counter("restore.tokens") - before == 256
    server.flush_device()
    with server.switched_on("corrupt_restored_key"):
        assert np.max(np.abs(score() - expected)) > TOLERANCE


@pytest.mark.parametrize("form", ["json_schema", "regex"])
def test_structured_output(server: TierServer, form: str) -> None:
    prompt = random_prompt(5, 400)
    rule = {"json_schema": json.dumps(SCHEMA), "regex": r"(yes|no), [0-9]{3}\."}[form]
    sampling = {form: rule, "max_new_tokens": 60, "ignore_eos": False}
    in_tiers(server, prompt)
    # Asked first: the grammar is compiled while the request does not wait in the queue yet.
    answer = generate(server, prompt, sampling=sampling, return_logprob=True)
    expected = generate(server, prompt, sampling=sampling, return_logprob=True, extra_key="recomputed")
    assert restored_of(answer["meta_info"]) == 384
    assert expected["meta_info"]["cached_tokens"] == 0
    assert answer["text"] == expected["text"]
    one, other = (logprobs_of(item["meta_info"]["output_token_logprobs"]) for item in (answer, expected))
    np.testing.assert_allclose(one, other, atol=TOLERANCE)
    if form == "regex":
        assert re.fullmatch(rule, answer["text"])
    else:
        assert set(json.loads(answer["text"])) == {"name", "old"}


def test_several_samples(server: TierServer) -> None:
    """``n``: SGLang computes the prompt once, then asks for all samples."""
    prompt = random_prompt(6, 400)
    expected = generate(server, prompt, extra_key="recomputed", return_logprob=True)["meta_info"]
    in_tiers(server, prompt)
    before = server.counter("restore.tokens")
    samples = generate(server, prompt, sampling={"n": 3}, return_logprob=True)
    assert server.counter("restore.tokens") - before == 384, "once for all of them"
    assert len(samples) == 3
    for sample in samples:
        items = sample["meta_info"]["output_token_logprobs"]
        assert [item[1] for item in items] == [item[1] for item in expected["output_token_logprobs"]]
        np.testing.assert_allclose(
            logprobs_of(items), logprobs_of(expected["output_token_logprobs"]), atol=TOLERANCE
        )


def test_streaming(server: TierServer) -> None:
    prompt = random_prompt(7, 400)
    expected = server.recompute(prompt, tokens=40)
    in_tiers(server, prompt)
    events = list(server.stream(prompt, tokens=40))
    meta = events[-1]["meta_info"]
    assert len(events) > 1
    assert restored_of(meta) == 384
    assert tuple(events[-1]["output_ids"]) == expected.tokens
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])


def test_a_reader_who_leaves(server: TierServer) -> None:
    prompt = random_prompt(8, 400)
    in_tiers(server, prompt)
    server.leave_after_the_first_token(prompt)
    server.assert_nothing_left()
    assert largest_difference(server.ask(prompt), server.recompute(prompt)) <= TOLERANCE


@pytest.mark.parametrize("path", ["/v1/embeddings", "/encode", "/classify"])
def test_embeddings_are_refused(server: TierServer, path: str) -> None:
    """By SGLang, for ``--is-embedding`` is refused with the tier; and nothing is saved of the request."""
    prompt = random_prompt(9, 200)
    sealed = server.counter("host.chunks_sealed")
    response = server.post(path, {"model": "m", "input": prompt, "input_ids": prompt, "text": None})
    assert response.status_code == 400, response.text
    assert server.ask(prompt).cached == 0
    server.settle()
    assert server.counter("host.chunks_sealed") == sealed + 3


def test_priorities(server: TierServer) -> None:
    """Requests are served by priority, but do not wait for one that restores."""
    prompts = [random_prompt(10 + number, 500 + 20 * number) for number in range(6)]
    references = [server.recompute(prompt) for prompt in prompts]
    restored, computed = prompts[::2], prompts[1::2]
    in_tiers(server, *restored)
    with ThreadPoolExecutor(len(prompts)) as threads:
        with server.switched_on("hold_restore"):
            asked = {
                number: threads.submit(server.ask, prompt, priority=number)
                for number, prompt in enumerate(prompts)
            }
            for number in range(1, len(prompts), 2):
                asked[number].result(timeout=120)
            wait_for(lambda: waiting(server) == len(restored), "the others to be queued")
        answers = [asked[number].result(timeout=120) for number in range(len(prompts))]
    for prompt, answer, reference in zip(prompts, answers, references, strict=True):
        assert largest_difference(answer, reference) <= TOLERANCE
        assert answer.restored == (0 if prompt in computed else len(prompt) // 64 * 64)
    server.assert_nothing_left()


def waiting(server: TierServer) -> int:
    """Requests that wait for their restore."""
    phases = server.state()["requests"]
    return int(phases["pending"] + phases["running"])


def test_a_full_queue(server: TierServer) -> None:
    """The ninth request takes the place of one of lower priority, which waits for its restore."""
    prompts = [random_prompt(20 + number, 300) for number in range(9)]
    references = [server.recompute(prompt) for prompt in prompts]
    in_tiers(server, *prompts)
    with ThreadPoolExecutor(len(prompts)) as threads:
        with server.switched_on("hold_restore"):
            asked = [threads.submit(generate_or_not, server, prompt, 0) for prompt in prompts[:8]]
            wait_for(lambda: waiting(server) == 8, "all to be queued")
            asked.append(threads.submit(generate_or_not, server, prompts[8], 1))
            wait_for(lambda: any(item.done() for item in asked), "one to lose its place")
            wait_for(lambda: waiting(server) == 8, "and its ticket")
        answers = [item.result(timeout=120) for item in asked]
    assert answers[8] is not None
    assert sum(answer is None for answer in answers) == 1
    for answer, reference in zip(answers, references, strict=True):
        if answer is not None:
            assert restored_of(answer["meta_info"]) == 256
            assert tuple(answer["output_ids"]) == reference.tokens
    server.assert_nothing_left()


def generate_or_not(server: TierServer, prompt: list[int], priority: int) -> Any:
    """The response; None if the request lost its place in the queue."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = server.post(
        "/generate", {"input_ids": prompt, "sampling_params": sampling, "priority": priority}
    )
    if response.status_code == 503:
        return None
    assert response.status_code == 200, response.text
    return response.json()


def test_prefill_and_decode_in_one_pass(server: TierServer) -> None:
    """``--enable-mixed-chunk``: what is saved of such passes is right. SGLang mixes none with logprobs."""
    prompts = [random_prompt(30 + number, 700) for number in range(3)]
    references = [server.recompute(prompt, tokens=60) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(generate, server, prompt, sampling={"max_new_tokens": 60}) for prompt in prompts
        ]
        answers = [item.result(timeout=120) for item in asked]
    server.to_tiers()
    for prompt, answer, reference in zip(prompts, answers, references, strict=True):
        assert tuple(answer["output_ids"]) == reference.tokens
        history = [*prompt, *reference.tokens]
        restored = server.ask(history)
        assert restored.restored == 704
        assert largest_difference(restored, server.recompute(history)) <= TOLERANCE


@pytest.mark.parametrize("api", ["generate", "chat"])
def test_a_request_that_may_not_be_stored(server: TierServer, api: str) -> None:
    """Neither its prompt nor its answer; it is served from what others left, and others start on what it left."""
    text = "Nobody may keep this, whoever asks, for as long as it lasts. " * 16

    def ask(store: object) -> int:
        """Tokens that came out of the tiers."""
        params = {"hcache_store": store} if store is not None else {}
        if api == "generate":
            sampling = {"custom_params": params, "max_new_tokens": 80}
            return restored_of(generate(server, random_prompt(31, 500), sampling=sampling)["meta_info"])
        body = {"model": "m", "max_tokens": 80, "temperature": 0, "ignore_eos": True, "custom_params": params}
        before = server.counter("restore.tokens")
        response = server.post(
            "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        )
        assert response.status_code == 200, response.text
        return server.counter("restore.tokens") - before

    for store in (False, "no", None):
        assert ask(store) == 0, "nothing was stored before"
        server.to_tiers()
        state = server.state()
        stored = state["host"]["clean"] + state["host"]["dirty"] + state["disk"]["chunks"]
        assert (stored > 0) is (store is None)
    assert ask(False) > 200
    assert ask(None) == 0, "from the device"
    server.assert_nothing_left()


def test_the_switch_wants_an_admin_key(server: TierServer) -> None:
    """``test_switch.py`` has one; here everybody would have the key."""
    assert [server.switch_off().status_code, server.switch_on().status_code] == [400, 400]
    assert server.state()["nothing_saved"] is None
