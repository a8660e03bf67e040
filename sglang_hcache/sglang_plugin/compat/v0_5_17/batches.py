"""What the hooks read of SGLang's requests and batches."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_hcache.capture.events import RequestRows
from sglang_hcache.sglang_plugin.seam.protocols import Adapters, Prompt
from sglang_hcache.sglang_plugin.serving.bridge import Bridge

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

_STORE = "hcache_store"
"""In a request's ``custom_params``: false where nothing of it may be stored."""


def keep_apart(req: Req, adapters: Adapters | None) -> None:
    """Let no request find in the radix tree what the tokens of ``req`` do not determine.

    SGLang 0.5.17 looks nothing up for a request that replaces embeddings of some tokens (``/v1/score``), but files its
    KV under those tokens: others would start on it, and what they compute behind it would be saved. A request without
    an adapter, whose ``extra_key`` is an adapter's id, it takes for one with it. Not all of its APIs check that an
    ``extra_key`` is text.
    """
    has_odd_key = not isinstance(req.extra_key, str | None)
    if has_odd_key or req.positional_embed_overrides is not None or _poses(req, adapters):
        req.extra_key = secrets.token_hex(16)


def _poses(req: Req, adapters: Adapters | None) -> bool:
    if adapters is None or req.lora_id is not None or req.extra_key is None:
        return False
    return adapters.apart(req.extra_key)[1] is not None


def prompt_of(req: Req) -> Prompt | None:
    """The part of a queued request that a tier may serve; None if its tokens do not determine its KV, or if SGLang is
    to return hidden states of all tokens, which it does of those that it computes.
    """
    if not _is_plain(req) or req.return_hidden_states is True:
        return None
    tokens = req.full_untruncated_fill_ids
    return Prompt(req.rid, tokens[: req._compute_max_prefix_len(len(tokens))], req.extra_key)


def is_matched_anew(req: Req, bridge: Bridge) -> bool:
    """Whether its prefix in the tree matters now: it may be admitted, or has none yet to be sorted by."""
    return req.last_node is None or bridge.restores.may_be_admitted(req.rid)


def begin_captures(batch: ScheduleBatch, bridge: Bridge) -> None:
    """Announce the requests of a new extend batch to the save path."""
    for req in batch.reqs:
        if not bridge.saving.ids.enters(req.rid, id(req)):
            bridge.saving.end(req.rid)  # rows come with an id: one's would be taken for the other's
        elif is_saved(req) and req.rid not in bridge.saving.captured:  # else a prompt in several pieces
            prefix = req.full_untruncated_fill_ids[: len(req.prefix_indices)]
            bridge.begin_capture(req.rid, req.extra_key, prefix)


def end_thinking(batch: ScheduleBatch, bridge: Bridge) -> None:
    """Save no more of requests that think: SGLang will keep their prompts only."""
    for req in batch.reqs:
        if req.reasoning_tokens:
            bridge.saving.end(req.rid)


def report_cached_tokens(batch: ScheduleBatch, bridge: Bridge) -> None:
    """End the tickets of admitted requests and say in ``cached_tokens_details`` what was restored for them."""
    for req in batch.reqs:
        admission = bridge.restores.admitted(req.rid, len(req.prefix_indices))
        if req.retracted_stain:
            continue  # SGLang counts the first admission only
        if admission.host or admission.disk:
            req.cached_tokens_device = max(0, req.cached_tokens_device - admission.host - admission.disk)
            req.cached_tokens_host += admission.host
            req.cached_tokens_storage += admission.disk
        if logger.isEnabledFor(logging.DEBUG) and admission.life.events:
            req.hcache_life = admission.life


def log_life(req: Req) -> None:
    """The request is over: a line in the debug log with what happened to it."""
    life = getattr(req, "hcache_life", None)
    if life is None:
        return
    cached = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    life.add("over after %d tokens", len(req.output_ids))
    logger.debug(
        "hcache: request %r: prompt of %d tokens = %d device + %d host + %d storage + %d computed: %s",
        req.rid, len(req.origin_input_ids), *cached, len(req.origin_input_ids) - sum(cached), life,
    )  # fmt: skip


def rows_of(batch: ForwardBatch) -> list[RequestRows] | None:
    """Whose rows a forward pass computes; None for passes that are not captured."""
    rids = batch.rids or []
    if batch.forward_mode.is_decode():
        return [
            RequestRows(rid, int(length) - 1, row, 1)
            for row, (rid, length) in enumerate(zip(rids, batch.seq_lens_cpu.tolist(), strict=True))
        ]
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return None
    requests, row = [], 0
    for rid, prefix, count in zip(rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True):
        requests.append(RequestRows(rid, int(prefix), row, int(count)))
        row += int(count)
    return requests


def is_typical(batch: ForwardBatch) -> bool:
    """Whether a pass takes as long as its tokens: logprobs of prompts need the output layer for all of them."""
    if not batch.return_logprob or batch.forward_mode.is_decode():
        return True
    starts, counts = batch.extend_logprob_start_lens_cpu or (), batch.extend_seq_lens_cpu or ()
    return all(start >= count for start, count in zip(starts, counts, strict=False))


def is_saved(req: Req) -> bool:
    """Whether what is computed of it is saved."""
    return _is_plain(req) and _may_be_stored(req)


def _is_plain(req: Req) -> bool:
    """Whether its tokens and its tenant determine its KV, and nothing else holds or moves that."""
    return (
        req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and req.token_type_ids is None
        and req.multi_item_delimiter_indices is None
        and req.session is None
    )


def _may_be_stored(req: Req) -> bool:
    """Whoever writes anything but true does not want it to be."""
    params = req.sampling_params.custom_params
    return not isinstance(params, dict) or params.get(_STORE, True) is True
