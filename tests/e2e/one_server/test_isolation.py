"""What must not be shared is not: by tenants, by requests whose tokens do not say what they mean.

A stranger who asks for what somebody else has stored learns nothing of it: neither from the tokens that came from a
cache, nor from what the tier counts and does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from tests.e2e.harness import TOLERANCE, TierServer, largest_difference, random_prompt

TEXT = "What does the author say about hidden states, and who was the first to see it? " * 10
HIDDEN_SIZE = 256


@contextmanager
def nothing_is_found(server: TierServer) -> Iterator[None]:
    """No request meanwhile finds or gets anything from a tier."""

    def told() -> dict[str, Any]:
        counters = server.state()["counters"]
        return {
            name: value
            for name, value in counters.items()
            if name.startswith("restore.") or name == "lookup.hits"
        }

    before = told()
    yield
    assert told() == before


# -- tenants -------------------------------------------------------------------------------------


def by_extra_key(server: TierServer, tenant: str | None) -> int:
    return server.ask(random_prompt(1, 600), extra_key=tenant).cached


def by_completion(server: TierServer, tenant: str | None) -> int:
    return cached_of(server, "/v1/completions", prompt=random_prompt(1, 600), cache_salt=tenant)


def by_completion_with_key(server: TierServer, tenant: str | None) -> int:
    return cached_of(server, "/v1/completions", prompt=random_prompt(1, 600), extra_key=tenant)


def by_chat(server: TierServer, tenant: str | None) -> int:
    messages = [{"role": "user", "content": TEXT}]
    return cached_of(server, "/v1/chat/completions", messages=messages, cache_salt=tenant)


def cached_of(server: TierServer, path: str, **fields: Any) -> int:
    response = server.post(path, {"model": "m", "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    details = response.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def by_response(server: TierServer, tenant: str | None) -> int:
    return cached_of(server, "/v1/responses", input=TEXT, max_output_tokens=4, cache_salt=tenant)


def by_grpc(server: TierServer, tenant: str | None) -> int:
    """SGLang's messages hold JSON where this one holds its bytes."""
    body = {"model": "m", "max_tokens": 4, "messages": MESSAGES, "cache_salt": tenant}
    with grpc.insecure_channel(f"127.0.0.1:{server.internal_state()['grpc_port']}") as channel:
        call = channel.unary_stream(
            "/sglang.runtime.v1.SglangService/ChatComplete",
            BytesValue.SerializeToString,
            BytesValue.FromString,
        )
        answer = b"".join(chunk.value for chunk in call(BytesValue(value=json.dumps(body).encode())))
    return int((json.loads(answer)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def by_prediction(server: TierServer, tenant: str | None) -> int:
    parameters = {"extra_key": tenant, "sampling_params": {"max_new_tokens": 4}}
    response = server.post("/vertex_generate", {"instances": [{"text": TEXT}], "parameters": parameters})
    assert response.status_code == 200, response.text
    return int(response.json()[0]["meta_info"]["cached_tokens"])


@pytest.mark.parametrize(
    "ask", [by_extra_key, by_completion, by_completion_with_key, by_chat, by_response, by_grpc, by_prediction]
)
def test_tenants(server: TierServer, ask: Callable[[TierServer, str | None], int]) -> None:
    assert ask(server, "red") == 0
    server.to_tiers()
    for stranger in ("blue", "re", "red ", None):
        with nothing_is_found(server):
            assert ask(server, stranger) == 0
    server.to_tiers()
    found = server.counter("restore.done")
    for tenant in ("red", "blue", None):
        assert ask(server, tenant) > 0
        found += 1
        assert server.counter("restore.done") == found


def test_tenants_of_one_batch(server: TierServer) -> None:
    prompt = random_prompt(2, 400)

    def ask(*tenants: str) -> list[int]:
        body = {
            "input_ids": [prompt] * len(tenants),
            "extra_key": list(tenants),
            "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        }
        answers = server.post("/generate", body).json()
        return [answer["meta_info"]["cached_tokens"] for answer in answers]

    assert ask("red", "blue") == [0, 0]
    server.to_tiers()
    assert ask("blue", "green") == [384, 0]


@pytest.mark.parametrize(
    ("ask", "key"), [(by_prediction, [5]), (by_prediction, [{}]), (by_extra_key, ["red"])]
)
def test_keys_that_are_no_text(server: TierServer, ask: Callable[[TierServer, Any], int], key: Any) -> None:
    """SGLang lets them through to its scheduler, which by itself does not survive those that cannot be hashed."""
    for tenant in (key, key, "red"):
        assert ask(server, tenant) == 0
        server.to_tiers()


MESSAGES = [{"role": "user", "content": TEXT}]
WITHOUT_TENANTS = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/generate": {"prompt": TEXT, "stream": False, "options": {"num_predict": 4}},
    "/v1/score": {"query": TEXT, "items": ["one"], "label_token_ids": [5, 6]},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
}


@pytest.mark.parametrize("path", WITHOUT_TENANTS)
def test_apis_that_do_not_take_what_keeps_requests_apart(server: TierServer, path: str) -> None:
    """SGLang drops the fields, as the table in docs/isolation.md says of them."""

    def ask(tenant: str) -> None:
        wishes = {"cache_salt": tenant, "extra_key": tenant, "custom_params": {"hcache_store": False}}
        response = server.post(path, {"model": "m", **WITHOUT_TENANTS[path], **wishes})
        assert response.status_code == 200, response.text

    ask("red")
    server.to_tiers()
    state = server.state()
    assert state["host"]["clean"] + state["host"]["dirty"] + state["disk"]["chunks"] > 0
    restored = server.counter("restore.done")
    ask("blue")
    takes_tenants = path == "/v1/responses"
    assert server.counter("restore.done") - restored == (0 if takes_tenants else 1)


# -- what is computed of more than tokens ----------------------------------------------------------


def test_replaced_embeddings(server: TierServer) -> None:
    """The score API replaces embeddings of some tokens. Two users with the same tokens mean different things."""
    query, item = random_prompt(3, 300), random_prompt(4, 20)
    places = range(5, 300, 10)
    for place in places:
        query[place] = 7  # in no random prompt
    reference = server.recompute([*query, *item])
    labels = sorted(set(reference.tokens))  # tokens that the model may say at all

    def score(user: int) -> list[float]:
        replaced = np.random.default_rng(user).normal(size=(len(places), HIDDEN_SIZE)).tolist()
        body = {
            "model": "m",
            "query": query,
            "items": [item],
            "label_token_ids": labels,
            "embed_override_token_id": 7,
            "query_embed_overrides": replaced,
            "apply_softmax": True,
        }
        response = server.post("/v1/score", body)
        assert response.status_code == 200, response.text
        return list(response.json()["scores"][0])

    first, other = score(1), score(2)
    assert max(abs(a - b) for a, b in zip(first, other, strict=True)) > TOLERANCE, "they make a difference"
    with nothing_is_found(server):
        plain = server.ask([*query, *item])
        assert plain.cached == 0, "neither on the device"
        assert largest_difference(plain, reference) <= TOLERANCE
    server.to_tiers()
    with nothing_is_found(server):
        assert score(1) == pytest.approx(first, abs=TOLERANCE)
        assert score(2) == pytest.approx(other, abs=TOLERANCE)
    server.flush_device()
    again = server.ask([*query, *item])
    assert again.restored == 256
    assert largest_difference(again, reference) <= TOLERANCE


def test_input_embeddings_are_refused(server: TierServer) -> None:
    """By SGLang, which takes them without a radix cache only."""
    body = {"input_embeds": [[0.1] * HIDDEN_SIZE] * 80, "sampling_params": {"max_new_tokens": 2}}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert "disable_radix_cache" in response.text


def test_adapters_without_the_flag_are_refused(server: TierServer) -> None:
    """By SGLang, which wants ``--enable-lora`` at start."""
    prompt = random_prompt(5, 200)
    load = server.post("/load_lora_adapter", {"lora_name": "one", "lora_path": "/nowhere"})
    assert load.status_code == 400, load.text
    use = server.post("/generate", {"input_ids": prompt, "lora_path": "one"})
    assert use.status_code == 400, use.text
    assert server.ask(prompt).cached == 0


def test_images_mean_nothing_to_this_model(server: TierServer) -> None:
    """A model that reads images is refused at start. Others drop them, so that requests may share what they store."""
    prompt = random_prompt(6, 300)
    plain = server.recompute(prompt)
    for number, image in enumerate(("data:image/png;base64,AAAA", "data:image/png;base64,BBBB")):
        answer = server.ask(prompt, image_data=[image])
        assert answer.cached == (256 if number else 0)
        assert largest_difference(answer, plain) <= TOLERANCE
        server.to_tiers()


def test_sessions_are_neither_saved_nor_restored(server: TierServer) -> None:
    prompt = random_prompt(8, 400)
    reference = server.recompute(prompt)
    server.ask(prompt)
    server.to_tiers()
    session = server.post("/open_session", {"capacity_of_str_len": 10000}).json()
    with nothing_is_found(server):
        first = server.ask(prompt, rid="turn-1", session_params={"id": session, "rid": None})
        assert first.cached == 0
        assert largest_difference(first, reference) <= TOLERANCE
    server.forget_everything()
    more = random_prompt(9, 200)
    history = [*prompt, *first.tokens, *more]
    second = server.ask(more, session_params={"id": session, "rid": "turn-1"})
    assert second.prompt_tokens == len(history)
    assert largest_difference(second, server.recompute(history)) <= TOLERANCE
    server.post("/close_session", {"session_id": session})
    server.to_tiers()
    with nothing_is_found(server):
        assert server.ask(history).cached == 0
