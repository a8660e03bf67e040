"""What is hooked in a scheduler process that uses the tier, and the check that all of it is in place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import CacheAwarePolicy
from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import get_num_new_pages

from sglang_hcache.sglang_plugin.compat.v0_5_17 import batches, cpu, switching
from sglang_hcache.sglang_plugin.compat.v0_5_17.adapters import load_everywhere
from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import create_cache, errors_in_a_line
from sglang_hcache.sglang_plugin.compat.v0_5_17.clearing import ClearCalls
from sglang_hcache.sglang_plugin.compat.v0_5_17.runner import (
    capture_first,
    device_buffers,
    ranks_of,
    schedule_first,
)
from sglang_hcache.sglang_plugin.compat.v0_5_17.scheduler import SchedulerOf
from sglang_hcache.sglang_plugin.launch import stopping
from sglang_hcache.sglang_plugin.launch.flags import BACKEND, config_of
from sglang_hcache.sglang_plugin.seam import hooking
from sglang_hcache.sglang_plugin.serving.bridge import Bridge

_MANAGERS = "sglang.srt.managers"
_POLICY = f"{_MANAGERS}.schedule_policy.SchedulePolicy"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GRAPH_CAPTURE = "sglang.srt.distributed.parallel_state.GroupCoordinator.graph_capture"
_LOOP = f"{_MANAGERS}.scheduler.dispatch_event_loop"
_DECODE_PAGES = "sglang.srt.mem_cache.allocation.alloc_paged_token_slots_decode"
_WEIGHTS = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_SWITCH_S = 5e-4
"""After which a thread gives the interpreter's lock to one that waits for it; Python's own 5 ms are a decode pass. The
scheduler gives it up in many of torch's calls, and launches nothing until it has it back."""

_READING_CHECKS = ("snapshot", "compare", "checksum")
"""Actions of ``/weights_checker``; the other one, ``reset_tensors``, overwrites the weights with random ones."""


def install(device: str) -> None:
    """Register the backend and apply the hooks; those for a CPU, or for CUDA, only if ``device`` is one.

    Does not return where the server's main process has ended.

    Raises:
        ConfigError: as :func:`hooking.apply`.
    """
    stopping.end_with_parent()
    register_radix_cache_backend(BACKEND, create_cache)
    targets: dict[str, hooking.Hook] = {
        f"{_MANAGERS}.scheduler.Scheduler.__init__": (_scheduler_built, HookType.AFTER),
        f"{_MANAGERS}.scheduler.Scheduler._prefetch_kvcache": (_request_queued, HookType.AROUND),
        f"{_POLICY}._compute_prefix_matches": (_queue_matched, HookType.AROUND),
        f"{_MANAGERS}.scheduler.Scheduler.process_input_requests": (_requests_come, HookType.BEFORE),
        f"{_MANAGERS}.scheduler.Scheduler.clear_hicache_storage_wrapped": (_clear, HookType.REPLACE),
        f"{_MANAGERS}.scheduler.Scheduler.detach_hicache_storage_wrapped": (_switch_off, HookType.REPLACE),
        f"{_MANAGERS}.scheduler.Scheduler.attach_hicache_storage_wrapped": (_switch_on, HookType.REPLACE),
        f"{_MANAGERS}.scheduler.Scheduler.get_internal_state": (_internal_state, HookType.AFTER),
        f"{_MANAGERS}.schedule_batch.ScheduleBatch.prepare_for_extend": (_batch_prepared, HookType.AFTER),
        f"{_MANAGERS}.schedule_batch.ScheduleBatch.prepare_for_decode": (_will_decode, HookType.BEFORE),
        _DECODE_PAGES: (_pages_taken, HookType.AROUND),
        f"{_RUNNER}.load_model": (_model_loaded, HookType.AFTER),
        f"{_RUNNER}.forward": (_forward, HookType.AROUND),
    }
    for method in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        targets[f"{_MANAGERS}.scheduler.Scheduler.{method}"] = (load_everywhere, HookType.AROUND)
    if device == "cuda":
        sys.setswitchinterval(_SWITCH_S)
        targets[_GRAPH_CAPTURE] = (capture_first, HookType.AROUND)
        targets[_LOOP] = (schedule_first, HookType.AROUND)
    for method in (
        *(f"update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc")),
        "release_memory_occupation",
    ):
        targets[f"{_WEIGHTS}.{method}"] = (_weights_will_change, HookType.BEFORE)
    targets[f"{_WEIGHTS}.check_weights"] = (_weights_will_be_checked, HookType.BEFORE)
    hooking.apply(targets | _cpu_fixes(device))


def install_cpu_fixes(device: str) -> None:
    """Replace what SGLang 0.5.17 does badly on a CPU, if ``device`` is one. Also for a server without the tier.

    Raises:
        ConfigError: as :func:`hooking.apply`.
    """
    hooking.apply(_cpu_fixes(device))


def _cpu_fixes(device: str) -> dict[str, hooking.Hook]:
    return cpu.fixes() if device == "cpu" else {}


def _model_loaded(_result: None, runner: Any, *_args: object, **_kwargs: object) -> None:
    """Before the KV pool is sized, and CUDA graphs are recorded."""
    with errors_in_a_line():
        runner.hcache_ranks = ranks_of(runner)
        runner.hcache_buffers = device_buffers(runner, config_of(runner.server_args).method)


def _scheduler_built(_result: None, scheduler: Any, *_args: object, **_kwargs: object) -> None:
    with errors_in_a_line():
        scheduler.tree_cache.build_tier(SchedulerOf(scheduler))
    scheduler.hcache_clear_calls = ClearCalls()
    stopping.leave_signals_to_parent()
    stopping.save_when_told(scheduler.tree_cache.bridge.last_writes.begin)


def _requests_come(scheduler: Any, requests: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    restores = scheduler.tree_cache.bridge.restores
    # They may ask whether the server is idle. It is not while requests wait: what was restored for those goes into the
    # tree in a tick, and not while SGLang is paused, for the weights may be about to change.
    if (requests or scheduler._engine_paused) and not restores.waiting:
        restores.reap()
    if scheduler._engine_paused and restores.running and not requests:
        restores.pause()
    unanswered = scheduler.hcache_clear_calls.unanswered
    return ((scheduler, [*requests, *unanswered]), {}) if unanswered else None


def _clear(scheduler: Any, request: Any) -> Any:
    view, bridge = SchedulerOf(scheduler), scheduler.tree_cache.bridge
    return scheduler.hcache_clear_calls.handle(request, bridge, may_pause=not view.is_running())


def _switch_off(scheduler: Any, request: Any) -> Any:
    return switching.detach(request, scheduler.tree_cache.bridge)


def _switch_on(scheduler: Any, request: Any) -> Any:
    return switching.attach(request, scheduler.tree_cache.bridge)


def _request_queued(_original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """In place of SGLang's prefetch from its own storage: look what the tiers have behind the device's prefix."""
    bridge = scheduler.tree_cache.bridge
    batches.keep_apart(req, bridge.adapters)
    req.init_next_round_input()  # its tokens; SGLang looks for them in the tree when the request may be admitted
    prompt = batches.prompt_of(req)
    if prompt is None:
        bridge.restores.newcomer()
    else:
        bridge.queue(prompt)


def _queue_matched(
    original: Callable[..., set[str]], policy: Any, queue: list[Any], kind: CacheAwarePolicy
) -> set[str]:
    """Not once more in each round, so between all decode passes, for those who wait for their restore."""
    if kind is CacheAwarePolicy.LPM:  # the other one needs the node of each
        queue = [req for req in queue if batches.is_matched_anew(req, policy.tree_cache.bridge)]
    return original(policy, queue, kind)


def _batch_prepared(_result: None, batch: Any, *_args: object, **_kwargs: object) -> None:
    bridge = batch.tree_cache.bridge
    batches.report_cached_tokens(batch, bridge)
    batches.begin_captures(batch, bridge)


def _will_decode(batch: Any, *_args: object, **_kwargs: object) -> None:
    bridge = batch.tree_cache.bridge
    if bridge.saving.drops_thoughts:
        batches.end_thinking(batch, bridge)


def _pages_taken(
    original: Callable[..., torch.Tensor],
    tree_cache: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """SGLang wants a free page for each request that decodes; few of them come to the end of theirs at once."""

    def needed() -> int:
        page_size = tree_cache.page_size
        return page_size * int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=page_size, decode=True))

    with tree_cache.taking(needed):
        return original(tree_cache, seq_lens, seq_lens_cpu, *args, **kwargs)


def _forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    bridge = getattr(runner, "hcache_bridge", None)  # set when the tier is built
    if bridge is None:
        return original(runner, forward_batch, *args, **kwargs)
    compute = partial(original, runner, forward_batch, *args, **kwargs)
    prefills = forward_batch.forward_mode.is_extend_or_draft_extend_or_mixed()
    with bridge.one_pass(prefills=prefills) as waits_first:
        return _save_pass(bridge, compute, forward_batch, waits_first)


def _save_pass(bridge: Bridge, compute: Callable[[], Any], forward_batch: Any, waits_first: bool) -> Any:
    """Carry out a forward pass, and save what it computes.

    Args:
        waits_first: whether it waits for restores, if for any, before it computes.
    """
    requests = batches.rows_of(forward_batch)
    if not requests:
        return compute()
    rids = [request.rid for request in requests]
    rows = slice(0, sum(request.count for request in requests))
    bridge.kv_arrives()  # whoever's pass it is: its KV may stay on the device
    if not bridge.saving.begin_pass(rids, forward_batch.input_ids[rows], forward_batch.out_cache_loc[rows]):
        return compute()
    try:
        output = compute()
    except BaseException:
        bridge.saving.abandon_pass()
        raise
    bridge.saving.end_pass(
        requests,
        is_typical=waits_first and batches.is_typical(forward_batch),
        is_replayed=bool(output.can_run_graph),
        is_prefill=not forward_batch.forward_mode.is_decode(),
    )
    return output


def _weights_will_change(updater: Any, *_args: object, **_kwargs: object) -> None:
    updater.tp_worker.model_runner.hcache_bridge.weights_will_change()


def _weights_will_be_checked(updater: Any, request: Any, *_args: object, **_kwargs: object) -> None:
    if request.action not in _READING_CHECKS:
        _weights_will_change(updater)


def _internal_state(result: Any, scheduler: Any, *_args: object, **_kwargs: object) -> None:
    result.internal_state["hcache"] = scheduler.tree_cache.bridge.state()
