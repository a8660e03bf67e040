"""What the hooks do to SGLang's queue, on its own classes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

PROMPT = 200


def request(rid: str, number: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokens = array("q", range(1000 * number, 1000 * number + PROMPT))
    return Req(rid, "", tokens, SamplingParams(max_new_tokens=4))


def test_who_is_queued_is_looked_up_by_the_tier_alone() -> None:
    """SGLang matches again when the request may be admitted: nobody reads what it would find before."""
    from sglang_hcache.sglang_plugin.hooks import _request_queued

    queued: list[Any] = []
    tree = SimpleNamespace(bridge=SimpleNamespace(queue=queued.append, adapters=None))  # has no match_prefix
    req = request("a", 1)
    _request_queued(lambda *_: None, SimpleNamespace(tree_cache=tree), req)
    assert [prompt.tokens for prompt in queued] == [req.origin_input_ids[:-1]]


@pytest.mark.parametrize(("kind", "matched"), [("lpm", ["b"]), ("dfs-weight", ["a", "b"])])
def test_who_waits_for_a_restore_is_not_matched_in_each_round(
    monkeypatch: pytest.MonkeyPatch, kind: str, matched: list[str]
) -> None:
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    from sglang_hcache.sglang_plugin.hooks import _queue_matched

    original = SchedulePolicy._compute_prefix_matches
    monkeypatch.setattr(
        SchedulePolicy, "_compute_prefix_matches", lambda *given: _queue_matched(original, *given)
    )
    tree: Any = RadixCache.create_simulated()
    held, seen, match = {"a"}, list[str](), tree.match_prefix
    tree.bridge = SimpleNamespace(restores=SimpleNamespace(may_be_admitted=lambda rid: rid not in held))
    tree.match_prefix = lambda params: seen.append(params.req.rid) or match(params)
    policy = SchedulePolicy(kind, tree, True, False, False)
    queue = [request("a", 1), request("b", 2)]

    policy.calc_priority(queue)
    assert sorted(seen) == ["a", "b"], "each of them once, to be sorted by it"
    seen.clear()
    policy.calc_priority(queue)
    assert sorted(seen) == matched
    assert len(queue) == 2
    held.clear()  # it was restored
    tree.insert(InsertParams(key=RadixKey(next(req for req in queue if req.rid == "a").origin_input_ids)))
    policy.calc_priority(queue)
    assert [req.rid for req in queue] == ["a", "b"]
