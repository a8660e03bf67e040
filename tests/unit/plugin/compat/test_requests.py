"""Which of SGLang's requests take part, on its own classes: some of them no server here can be sent."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PROMPT = array("q", range(200))


@pytest.fixture(scope="module")
def request_with() -> Callable[..., Any]:
    """Makes one of SGLang's requests, as its scheduler does before the request is queued."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    def make(**fields: Any) -> Any:
        req = Req("a", "", PROMPT, SamplingParams(max_new_tokens=4), **fields)
        req.init_next_round_input(None)
        return req

    return make


def test_tokens_and_tenant(request_with: Callable[..., Any]) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import keep_apart, prompt_of

    req = request_with(extra_key="red")
    keep_apart(req, None)
    prompt = prompt_of(req)
    assert prompt is not None
    assert (prompt.rid, prompt.tokens, prompt.tenant) == ("a", PROMPT[:-1], "red")


def test_a_client_writes_no_lines_into_the_log(
    request_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its request's id is what it says."""
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import log_life
    from sglang_hcache.sglang_plugin.serving.tickets import Life

    req = request_with()
    req.rid, req.hcache_life = "a\nhcache: error: b", Life()
    with caplog.at_level("DEBUG", logger="sglang_hcache"):
        log_life(req)
    (record,) = caplog.records
    assert record.message.startswith(r"hcache: request 'a\nhcache: error: b': prompt of 200 tokens")


@pytest.mark.parametrize(("start", "tokens"), [(-1, 199), (0, 0), (130, 130), (200, 199)])
def test_tokens_whose_logprobs_are_wanted_are_computed(
    request_with: Callable[..., Any], start: int, tokens: int
) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import prompt_of

    req = request_with(return_logprob=True)
    req.logprob_start_len = start
    prompt = prompt_of(req)
    assert prompt is not None
    assert len(prompt.tokens) == tokens


def images() -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    return MultimodalInputs([MultimodalDataItem(Modality.IMAGE, hash=7, feature=torch.ones(4, 8))])


def replaced() -> Any:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    return PositionalEmbeds(embeds=[torch.ones(8)], positions=[5])


def session() -> Any:
    from sglang.srt.session.session_controller import Session

    return Session(1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multimodal_inputs", images),
        ("input_embeds", lambda: [[0.5] * 8] * len(PROMPT)),
        ("positional_embed_overrides", replaced),
        ("session", session),
        ("token_type_ids", lambda: [0] * len(PROMPT)),
        ("multi_item_delimiter_indices", lambda: [50, 100]),
    ],
)
def test_more_than_tokens(request_with: Callable[..., Any], field: str, value: Callable[[], Any]) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import begin_captures, prompt_of
    from sglang_hcache.sglang_plugin.serving.request_ids import RequestIds

    req = request_with()
    assert prompt_of(req) is not None
    setattr(req, field, value())
    assert prompt_of(req) is None

    bridge: Any = SimpleNamespace(saving=SimpleNamespace(ids=RequestIds()))
    begin_captures(SimpleNamespace(reqs=[req]), bridge)  # type: ignore[arg-type]  # nothing is begun


def test_replaced_embeddings_are_filed_where_nobody_looks(request_with: Callable[..., Any]) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import keep_apart

    keys = set()
    for _ in range(2):
        req = request_with(positional_embed_overrides=replaced(), extra_key="red")
        keep_apart(req, None)
        keys.add(req.extra_key)
    assert len(keys - {"red", None}) == 2


@pytest.mark.parametrize("key", [5, 0, ["a"], {}])
def test_a_key_that_is_no_text_is_shared_with_nobody(request_with: Callable[..., Any], key: Any) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import keep_apart, prompt_of

    keys = set()
    for _ in range(2):
        req = request_with(extra_key=key)
        keep_apart(req, OneAdapter())
        prompt = prompt_of(req)
        assert prompt is not None
        keys.add(prompt.tenant)
    assert len(keys) == 2
    assert all(isinstance(key, str) for key in keys)


class OneAdapter:
    """Our ``Adapters``."""

    def apart(self, tenant: str) -> tuple[str | None, bytes | None]:
        return (tenant.removesuffix("one"), b"1") if tenant.endswith("one") else (tenant, None)


@pytest.mark.parametrize(
    ("extra_key", "lora_id", "is_kept"),
    [
        (None, None, True),
        ("red", None, True),
        ("redone", None, False),
        ("red", "one", True),
        (None, "one", True),
    ],
)
def test_nobody_poses_as_a_request_with_an_adapter(
    request_with: Callable[..., Any], extra_key: str | None, lora_id: str | None, is_kept: bool
) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import keep_apart, prompt_of

    req = request_with(extra_key=extra_key, lora_id=lora_id)
    before = req.extra_key
    keep_apart(req, OneAdapter())
    assert (req.extra_key == before) == is_kept
    prompt = prompt_of(req)
    assert prompt is not None
    assert prompt.tenant == req.extra_key


@pytest.mark.parametrize(
    ("wants", "starts", "typical"),
    [(False, None, True), (True, [100], True), (True, [0], False), (True, [100, 49], False)],
)
def test_passes_with_logprobs_of_prompts_take_longer_than_others(
    wants: bool, starts: list[int] | None, typical: bool
) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import is_typical

    counts = [100, 50]
    batch = SimpleNamespace(
        return_logprob=wants, extend_logprob_start_lens_cpu=starts, extend_seq_lens_cpu=counts
    )
    batch.forward_mode = ForwardMode.EXTEND
    assert is_typical(batch) is typical  # type: ignore[arg-type]
    batch.forward_mode = ForwardMode.DECODE
    assert is_typical(batch)  # type: ignore[arg-type]
