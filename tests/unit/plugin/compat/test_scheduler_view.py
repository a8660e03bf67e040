"""What is read of SGLang's scheduler in the middle of a round, where its batches are half merged."""

from __future__ import annotations

import random
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Req:
    """As SGLang's: equal to itself only."""

    def __init__(self, max_new_tokens: int, generated: int = 0, prompt: int = 0) -> None:
        self.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens)
        self.output_ids = array("q", range(generated))
        self.full_untruncated_fill_ids = array("q", range(prompt))
        self.prefix_indices = torch.empty(0)
        self.is_over = False

    def finished(self) -> bool:
        return self.is_over


def reserved(
    running: list[Req], last: list[Req] | None, chunked: Req | None = None, ratio: float = 0.5
) -> int:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    scheduler: Any = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=running),
        last_batch=None if last is None else SimpleNamespace(reqs=last),
        chunked_req=chunked,
        new_token_ratio_tracker=SimpleNamespace(current=ratio),
    )
    return SchedulerOf(scheduler).reserved_tokens()


def test_running_requests_reserve_a_share_of_what_they_may_generate() -> None:
    decoding = [Req(100, generated=20), Req(60)]
    assert reserved(decoding, None) == 70
    assert reserved(decoding, decoding) == 70, "who decodes is the last batch as well"


def test_what_is_reserved_does_not_depend_on_the_order_of_requests() -> None:
    """Ranks have theirs in another one, and have to come to the same number."""
    dice = random.Random(0)
    for _ in range(300):
        tokens, ratio = dice.choices(range(1, 2000), k=dice.randint(2, 40)), dice.choice((0.7, 0.69, 0.098))
        assert reserved([Req(count) for count in tokens], None, ratio=ratio) == int(ratio * sum(tokens))


def test_a_prompt_that_is_computed_in_passes() -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    chunked = Req(40, prompt=300)
    chunked.prefix_indices = torch.empty(128)
    scheduler: Any = SimpleNamespace(chunked_req=chunked)
    assert SchedulerOf(scheduler).prefilling() == (172, 128)
    scheduler.chunked_req = None
    assert SchedulerOf(scheduler).prefilling() == (0, 0)


@pytest.mark.parametrize(
    ("name", "has_priorities", "found"),
    [
        ("fcfs", False, "abcd"),
        ("fcfs", True, "badc"),
        ("lof", False, "dcba"),
        ("lof", True, "bdac"),
        ("random", True, "abcd"),
    ],
)
def test_the_queue_is_put_in_order_where_requests_say_what_it_is(
    name: str, has_priorities: bool, found: str
) -> None:
    """By SGLang itself; where the order follows anything else, that is left to the moment when it looks."""
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    queue: Any = [
        SimpleNamespace(
            rid=rid,
            priority=priority,
            time_stats=SimpleNamespace(wait_queue_entry_time=index),
            sampling_params=SimpleNamespace(max_new_tokens=10 * index),
        )
        for index, (rid, priority) in enumerate(zip("abcd", (3, 9, 1, 3), strict=True))
    ]
    tree: Any = SimpleNamespace(supports_fast_match_prefix=lambda: False)
    policy = SchedulePolicy(name, tree, False, has_priorities, False)
    scheduler: Any = SimpleNamespace(policy=policy, waiting_queue=queue)
    SchedulerOf(scheduler).order_queue()
    assert "".join(request.rid for request in queue) == found


def test_the_batch_is_full_until_somebody_looks_again() -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    scheduler: Any = SimpleNamespace(running_batch=SimpleNamespace(reqs=[Req(100)], batch_is_full=True))
    SchedulerOf(scheduler).look_again()
    assert not scheduler.running_batch.batch_is_full


@pytest.mark.parametrize(
    ("state", "looks"),
    [
        ({}, True),
        ({"batch_is_full": True}, False),
        ({"most": 2}, False),
        ({"most": 2, "chunked_req": Req(10)}, True),
        ({"batch_is_full": True, "enable_priority_preemption": True}, True),
    ],
)
def test_nobody_is_admitted_while_as_many_run_as_may(state: dict[str, Any], looks: bool) -> None:
    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    running = SimpleNamespace(reqs=[Req(10), Req(10)], batch_is_full=state.get("batch_is_full", False))
    scheduler: Any = SimpleNamespace(
        running_batch=running,
        chunked_req=state.get("chunked_req"),
        enable_priority_preemption=state.get("enable_priority_preemption", False),
        get_num_allocatable_reqs=lambda running_bs: state.get("most", 4) - running_bs,
    )
    assert SchedulerOf(scheduler).looks_at_queue() is looks


def test_who_was_prefilled_last_is_not_in_the_running_batch_yet() -> None:
    assert reserved([], [Req(100)]) == 50


def test_a_mixed_pass_leaves_the_running_batch_empty() -> None:
    """``--enable-mixed-chunk``: the pass that goes on with a prompt takes all that decode along."""
    chunked = Req(40, prompt=300)
    assert reserved([], [Req(100, generated=20), chunked], chunked) == 40 + 300 + 20


class Manager:
    """Of SGLang's ``LoRAManager``: a batch takes two adapters, or requests without one."""

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        return len(lora_ids) <= 2


class Drainer:
    """Of SGLang's ``LoRADrainer``."""

    def can_schedule(self, req: Any) -> bool:
        return req.lora_id != "drains"


@pytest.mark.parametrize(
    ("running", "last", "chunked", "queue", "passed_over"),
    [
        ([], [], [], ["a", "b", "c", "a", None], [False, False, True, False, True]),
        (["a"], [], [], ["b", "c", "a"], [False, True, False]),
        (["a"], ["b"], [], ["c", "b", "a", None], [True, False, False, True]),
        (["a"], [], ["b"], ["c", "b", "a"], [True, False, False]),
        ([None], [], [], ["c", "b", None], [False, True, False]),
        ([], [], [], ["drains", "b", "c", "a"], [True, False, False, True]),
    ],
)
def test_who_is_passed_over_for_its_adapter(
    running: list[str | None],
    last: list[str | None],
    chunked: list[str | None],
    queue: list[str | None],
    passed_over: list[bool],
) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf

    def requests(lora_ids: list[str | None]) -> list[Req]:
        made = [Req(10, prompt=5) for _ in lora_ids]
        for req, lora_id in zip(made, lora_ids, strict=True):
            req.lora_id, req.rid = lora_id, "a"  # type: ignore[attr-defined]
        return made

    scheduler: Any = SimpleNamespace(
        enable_lora=True,
        enable_lora_overlap_loading=False,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=Manager())),
        running_batch=SimpleNamespace(reqs=requests(running)),
        last_batch=SimpleNamespace(reqs=requests(last)),
        chunked_req=next(iter(requests(chunked)), None),
        lora_drainer=Drainer(),
        waiting_queue=requests(queue),
        page_size=1,
    )
    scheduler._can_schedule_lora_req = partial(Scheduler._can_schedule_lora_req, scheduler)
    assert [request.is_passed_over for request in SchedulerOf(scheduler).waiting()] == passed_over
    scheduler.lora_drainer = None
    for req in [*scheduler.running_batch.reqs, *scheduler.last_batch.reqs]:
        req.is_over = True  # and not taken out yet
    scheduler.chunked_req = None
    first, second, *_ = SchedulerOf(scheduler).waiting()
    assert not first.is_passed_over
    assert not second.is_passed_over
    scheduler.enable_lora = False
    assert not any(request.is_passed_over for request in SchedulerOf(scheduler).waiting())
