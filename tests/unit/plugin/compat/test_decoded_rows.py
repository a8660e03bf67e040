"""K and V of prompts and answers on a CPU, taken out of the pool at the end of each pass.

What SGLang's scheduler does is written out, with overlap scheduling or without.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from tests.unit.plugin.serving.test_weights_in_use import Served

LAYERS, SLOTS, ROW_BYTES = 3, 2048, 8
KV = StateLayout((Method.KV,) * LAYERS, (ROW_BYTES,) * LAYERS)
ROOT = Namespace(b"model", "a").root_key()
OF_SGLANG = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "token_type_ids")


class Scheduler(Served):
    """Prefills and decodes requests in a pool whose free slots hold what is nobody's.

    Args:
        overlaps: what a pass has generated is known when the next one has begun.
    """

    def __init__(self, *, overlaps: bool) -> None:
        from sglang_hcache.sglang_plugin import hooks

        self.hooks = hooks
        self._overlaps = overlaps
        self.pool = [
            (torch.full((SLOTS, 1, 1), -1.0), torch.full((SLOTS, 1, 1), -1.0)) for _ in range(LAYERS)
        ]
        super().__init__(KV, self.pool, 1024, slots=32)
        self._free = torch.randperm(SLOTS).tolist()
        self._table = torch.zeros(16, 512, dtype=torch.int32)
        self._requests = 0

    def request(self, rid: str, prompt: array[int], *, cached: int = 0) -> Any:
        self._requests += 1
        req = SimpleNamespace(
            rid=rid,
            extra_key=None,
            origin_input_ids=prompt,
            output_ids=array("q"),
            req_pool_idx=self._requests,
            kv_committed_len=cached,
            pending=array("q"),
            sampling_params=SimpleNamespace(custom_params={}),
            **dict.fromkeys([*OF_SGLANG, "multi_item_delimiter_indices", "lora_id", "session"]),
        )
        for position in range(cached):
            self._compute(req, position)
        return req

    def prefill(self, req: Any, *decoding: Any, piece: int | None = None) -> None:
        """What is left of its prompt and answer, or a piece of it; others decode beside it, as in mixed passes."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import begin_captures

        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.prefix_indices = range(req.kv_committed_len)
        begin_captures(SimpleNamespace(reqs=[req]), self.bridge)  # type: ignore[arg-type]
        if decoding:
            self._prepare(*decoding)
        begins = [req.kv_committed_len, *(one.kv_committed_len - 1 for one in decoding)]
        whole = len(req.full_untruncated_fill_ids)
        req.kv_committed_len = whole if piece is None else begins[0] + piece
        self._pass([req, *decoding], begins, ForwardMode.MIXED if decoding else ForwardMode.EXTEND)

    def decode(self, *reqs: Any, passes: int = 1) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        for _ in range(passes):
            self._prepare(*reqs)
            self._pass(reqs, [req.kv_committed_len - 1 for req in reqs], ForwardMode.DECODE)

    def finish(self, req: Any) -> None:
        """As the radix cache is told of it; its slots are others' then. Aborts are no different.

        If passes overlap, what the last one generates is dropped.
        """
        self.bridge.saving.end(req.rid)
        self.bridge.saving.ids.leaves(req.rid, id(req))
        slots = self._table[req.req_pool_idx, : req.kv_committed_len].long()
        for buffers in self.pool:
            for buffer in buffers:
                buffer[slots] = -1.0

    def retract(self, req: Any) -> None:
        """It will be prefilled again, with what it has said."""
        self.finish(req)
        del req.pending[:]
        req.kv_committed_len = 0

    def stored(self, req: Any) -> list[bool | None]:
        """Of each whole chunk of what it has computed: whether its rows are right; None: it is not stored."""
        tokens = (req.origin_input_ids + req.output_ids)[: req.kv_committed_len]
        host = self.bridge.tiers.host
        self.bridge.close()
        found: list[bool | None] = []
        for index, key in enumerate(chunk_keys(ROOT, tokens)):
            slot = host.pin(key)
            first, end = index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS
            found.append(
                None
                if slot is None
                else all(
                    torch.equal(
                        torch.from_numpy(host.layer_of(slot, layer)).view(torch.float32).view(-1, 2),
                        torch.stack([_row(layer, at, tokens[at]) for at in range(first, end)]),
                    )
                    for layer in range(len(self.pool))
                )
            )
        return found

    def _prepare(self, *reqs: Any) -> None:
        tree = SimpleNamespace(bridge=self.bridge)
        self.hooks._will_decode(SimpleNamespace(reqs=reqs, tree_cache=tree))
        for req in reqs:
            req.kv_committed_len += 1

    def _pass(self, reqs: Any, begins: list[int], mode: Any) -> None:
        counts = [req.kv_committed_len - begin for req, begin in zip(reqs, begins, strict=True)]

        def compute(*_: object) -> Any:
            for req, begin in zip(reqs, begins, strict=True):
                for position in range(begin, req.kv_committed_len):
                    self._compute(req, position)
            return SimpleNamespace(can_run_graph=False)

        rows = [
            (req, at)
            for req, begin in zip(reqs, begins, strict=True)
            for at in range(begin, req.kv_committed_len)
        ]
        batch = SimpleNamespace(
            rids=[req.rid for req in reqs],
            forward_mode=mode,
            return_logprob=False,
            extend_prefix_lens_cpu=begins,
            extend_seq_lens_cpu=counts,
            seq_lens_cpu=torch.tensor([req.kv_committed_len for req in reqs]),
            input_ids=torch.tensor([_token(req, at) for req, at in rows]),
        )
        for req, at in rows:
            self._table[req.req_pool_idx, at] = self._free.pop()
        batch.out_cache_loc = torch.tensor([int(self._table[req.req_pool_idx, at]) for req, at in rows])
        runner = SimpleNamespace(hcache_bridge=self.bridge)
        self.hooks._forward(compute, runner, batch)
        for req in reqs:
            if self._overlaps:
                self._learn(req)
            if req.kv_committed_len < len(req.full_untruncated_fill_ids):
                continue  # a piece of a prompt: nothing is generated
            req.pending.append(1000 * req.req_pool_idx + req.kv_committed_len)
            if not self._overlaps:
                self._learn(req)

    def _learn(self, req: Any) -> None:
        req.output_ids += req.pending
        del req.pending[:]

    def _compute(self, req: Any, position: int) -> None:
        slot = int(self._table[req.req_pool_idx, position])
        for layer, buffers in enumerate(self.pool):
            for buffer, value in zip(buffers, _row(layer, position, _token(req, position)), strict=True):
                buffer[slot] = value


def _token(req: Any, position: int) -> int:
    return int((req.origin_input_ids + req.output_ids + req.pending)[position])


def _row(layer: int, position: int, token: int) -> torch.Tensor:
    """K and V of a token."""
    return torch.tensor([layer * 1e6 + token, layer * 1e6 + position])


def prompt(seed: int, length: int) -> array[int]:
    return array("q", range(500 * seed, 500 * seed + length))


@pytest.fixture(params=[False, True], ids=["in turns", "overlapping"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    made = Scheduler(overlaps=request.param)
    yield made
    made.bridge.close()


def test_chunks_of_an_answer(scheduler: Scheduler) -> None:
    one = scheduler.request("one", prompt(1, 70))
    scheduler.prefill(one)
    scheduler.decode(one, passes=200)
    scheduler.finish(one)
    assert scheduler.stored(one) == [True] * 4
    assert not scheduler.watched, "a hook on every layer is called in every pass"


def test_a_prompt_in_pieces(scheduler: Scheduler) -> None:
    """That end inside of chunks, between passes of others."""
    one, late = scheduler.request("one", prompt(1, 70)), scheduler.request("late", prompt(2, 200))
    scheduler.prefill(one)
    for _ in range(3):
        scheduler.prefill(late, one, piece=50)
        scheduler.decode(one, passes=5)
    scheduler.prefill(late, one)
    scheduler.decode(one, late, passes=60)
    for req in (one, late):
        scheduler.finish(req)
    assert [scheduler.stored(req) for req in (one, late)] == [[True] * 2, [True] * 4]


def test_a_retracted_request_comes_again_with_what_it_has_said(scheduler: Scheduler) -> None:
    one, other = scheduler.request("one", prompt(1, 70)), scheduler.request("other", prompt(2, 100))
    scheduler.prefill(one)
    scheduler.prefill(other)
    scheduler.decode(one, other, passes=80)
    scheduler.retract(one)
    scheduler.decode(other, passes=10)
    scheduler.prefill(one, other, piece=100)
    scheduler.prefill(one)
    scheduler.decode(one, other, passes=60)
    for req in (one, other):
        scheduler.finish(req)
    assert [scheduler.stored(req) for req in (one, other)] == [[True] * 3] * 2


def test_several_that_decode_beside_each_other_and_beside_prefills(scheduler: Scheduler) -> None:
    """A decoded row in a mixed pass belongs behind those that are in the pool still."""
    one, other = scheduler.request("one", prompt(1, 70)), scheduler.request("other", prompt(2, 100))
    late = scheduler.request("late", prompt(3, 130))
    scheduler.prefill(one)
    scheduler.prefill(other, one)
    scheduler.decode(one, other, passes=50)
    scheduler.prefill(late, one, other)
    scheduler.decode(one, other, late, passes=30)
    for req in (one, other, late):
        scheduler.finish(req)
    assert [scheduler.stored(req) for req in (one, other, late)] == [[True] * 2] * 3


def test_what_comes_back_begins_inside_of_the_chunk_that_an_answer_began(scheduler: Scheduler) -> None:
    one = scheduler.request("one", prompt(1, 70))
    scheduler.prefill(one)
    scheduler.decode(one, passes=30)
    scheduler.finish(one)
    said = (one.origin_input_ids + one.output_ids)[: one.kv_committed_len]
    again = scheduler.request("again", said + prompt(2, 30), cached=len(said))
    scheduler.prefill(again)
    scheduler.finish(again)
    assert scheduler.stored(again) == [True, True]


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128])
def test_requests_that_begin_and_end_at_the_edges_of_chunks(scheduler: Scheduler, length: int) -> None:
    one = scheduler.request("one", prompt(1, length))
    scheduler.prefill(one)
    scheduler.decode(one, passes=192 - length)
    scheduler.finish(one)
    assert scheduler.stored(one) == [True] * 3


def test_rows_of_two_requests_of_one_id_are_not_mixed(scheduler: Scheduler) -> None:
    old, new = scheduler.request("again", prompt(1, 70)), scheduler.request("again", prompt(2, 70))
    scheduler.prefill(old)
    scheduler.decode(old, passes=10)
    scheduler.prefill(new)
    scheduler.decode(old, new, passes=64)
    scheduler.finish(old)
    scheduler.finish(new)
    assert [scheduler.stored(req) for req in (old, new)] == [[True, None], [None, None]]


def test_new_weights_end_the_chunk_that_an_answer_began(scheduler: Scheduler) -> None:
    one = scheduler.request("one", prompt(1, 70))
    scheduler.prefill(one)
    scheduler.decode(one, passes=10)
    scheduler.update("b")
    scheduler.decode(one, passes=64)
    scheduler.finish(one)
    assert scheduler.stored(one) == [True, None]


def test_kv_of_other_weights_is_noticed_though_no_chunk_of_it_is_whole(scheduler: Scheduler) -> None:
    one = scheduler.request("one", prompt(1, 70))
    scheduler.prefill(one)
    scheduler.update("b")
    scheduler.decode(one)
    scheduler.update("a")
    assert not scheduler.saves_behind_the_device()
