"""SGLang 0.5.17: the radix cache backend, and views of its pools."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.registry import TreeCacheBuildContext

from sglang_hcache.core.errors import ConfigError, HCacheError
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.device.streams import device_name
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.sglang_plugin.compat.v0_5_17.adapters import AdaptersOf
from sglang_hcache.sglang_plugin.compat.v0_5_17.batches import is_saved, log_life
from sglang_hcache.sglang_plugin.compat.v0_5_17.dropped import Dropped
from sglang_hcache.sglang_plugin.compat.v0_5_17.forward import ForwardOf
from sglang_hcache.sglang_plugin.compat.v0_5_17.runner import longest_replayed_prefill, served_model
from sglang_hcache.sglang_plugin.launch.flags import config_of
from sglang_hcache.sglang_plugin.launch.prefill_graphs import log_line
from sglang_hcache.sglang_plugin.seam.budget import (
    cuts_prompts,
    largest_pass_of,
    pass_rows_of,
    staged_passes_of,
)
from sglang_hcache.sglang_plugin.seam.model import ROUNDED, shape_of
from sglang_hcache.sglang_plugin.seam.protocols import (
    Device,
    DeviceMatch,
    SchedulerView,
)
from sglang_hcache.sglang_plugin.serving.bridge import Bridge
from sglang_hcache.sglang_plugin.setup.assembly import assemble
from sglang_hcache.sglang_plugin.setup.machine import computes_by, machine_name

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

logger = logging.getLogger(__name__)


def create_cache(context: TreeCacheBuildContext) -> HCacheRadixCache:
    """The factory registered as radix cache backend; the model is loaded when SGLang calls it."""
    with errors_in_a_line():
        return HCacheRadixCache(context)


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """An error of ours goes to the log before SGLang's traceback does."""
    try:
        yield
    except HCacheError as error:
        logger.error("hcache: error: %s", error)
        raise


@contextmanager
def _freed_together(allocator: BaseTokenToKVPoolAllocator) -> Iterator[None]:
    """What is freed meanwhile is free at the end. Not within another such group, which this one would end."""
    if not allocator.is_not_in_free_group:
        yield
        return
    allocator.free_group_begin()
    try:
        yield
    finally:
        allocator.free_group_end()


class HCacheRadixCache(RadixCache):
    """SGLang's radix cache over the tiers.

    It is also the ``DeviceTree`` of our own code (second half) and speaks the scheduler's protocol of a
    hierarchical cache with storage (third part).
    """

    def __init__(self, context: TreeCacheBuildContext) -> None:
        self.evictions = 0
        self._dropped = Dropped()
        self._enough: Callable[[], int] | None = None
        """Free tokens for which nobody has to give anything back; None: as many as SGLang asks for."""
        self._bridge: Bridge | None = None
        super().__init__(context.params)
        self._runner = context.tp_worker.model_runner
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        kv_dtypes = (context.model_config.dtype, *ROUNDED.values())
        shape = shape_of(context.model_config, num_ranks=context.tp_size)
        _check_pools(pool, self.req_to_token_pool, shape, kv_dtypes)
        self._pool = DevicePool(pool)
        self._server_args = context.server_args
        self.cache_controller = ControllerView()
        if self._runner.hcache_buffers is not None:
            passes = self._runner.hcache_buffers.stage.passes
            # Who attends tells it before each layer: for HiCache, whose counter does more, and none of that is read.
            pool.register_layer_transfer_counter(SimpleNamespace(wait_until=passes.layer))
        # The scheduler reads these to know whether work is in flight; only restores hold device slots.
        self.ongoing_write_through: dict[str, object] = {}
        self.ongoing_load_back: dict[str, object] = {}
        self.ongoing_backup: dict[str, object] = {}
        self.enable_storage = True

    def build_tier(self, scheduler: SchedulerView) -> None:
        """Once the scheduler is there: check, measure, and begin to capture and restore.

        Raises:
            HCacheError: see :func:`sglang_hcache.sglang_plugin.setup.assembly.assemble`.
        """
        ranks, enable_lora = self._runner.hcache_ranks, self._server_args.enable_lora
        device = Device(
            tree=self,
            pool=self._pool,
            scheduler=scheduler,
            forward=ForwardOf(self._runner),
            largest_pass=largest_pass_of(self._server_args),
            pass_rows=pass_rows_of(self._server_args),
            gpu=self._runner.hcache_buffers,
            cuts_prompts=cuts_prompts(self._server_args),
            drops_thoughts=self._server_args.strip_thinking_cache,
            staged_passes=staged_passes_of(self._server_args),
            adapters=AdaptersOf(self._runner.lora_manager, ranks) if enable_lora else None,
            ranks=ranks,
        )
        config = config_of(self._server_args).of_rank(ranks.rank, ranks.size)
        model = served_model(self._runner, self._pool.dtype)
        by = computes_by(model, str(self._server_args.attention_backend), is_cpu=device.is_cpu)
        machine = partial(machine_name, device_name(self._runner.device, self._runner.gpu_id), by)
        self._bridge = assemble(config, model, device, machine)
        if not device.is_cpu:
            logger.info(log_line(longest_replayed_prefill(self._runner)))
        self._runner.hcache_bridge = self._bridge  # where the hook on ModelRunner.forward finds it
        self.token_to_kv_pool_host = HostTierView(self._bridge)

    @property
    def bridge(self) -> Bridge:
        assert self._bridge is not None, "the tier has not been built"
        return self._bridge

    # -- RadixCache ------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As in the base class; for a request cut to whole chunks if it could not be saved from the match's end on."""
        result, key = super().match_prefix(params), params.key
        if params.req is None or not is_saved(params.req):
            return result
        end = len(result.device_indices)
        tail = key.token_ids[end - end % CHUNK_TOKENS : end]
        if self.bridge.may_begin_at(params.req.rid, key.extra_key, end, tail):
            return result
        return self._cut(key, result)

    def _cut(self, key: RadixKey, result: MatchResult) -> MatchResult:
        """What of ``result``, the match of ``key``, is whole chunks."""
        end = len(result.device_indices)
        rest = end % CHUNK_TOKENS
        return super().match_prefix(MatchPrefixParams(key=key[: end - rest])) if rest else result

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        self.bridge.saving.end(req.rid)
        self.bridge.saving.ids.leaves(req.rid, id(req))
        log_life(req)

    def evict(self, params: EvictParams) -> EvictResult:
        """As in the base class; where that is not enough, what was or is being restored for waiting requests goes."""
        allocator = self.token_to_kv_pool_allocator
        wanted = allocator.available_size() + params.num_tokens
        if self._enough is not None:
            wanted = min(wanted, self._enough())
        evicted = self._evict(params)
        while allocator.available_size() < wanted and self.bridge.restores.give_back():
            lacking = max(0, wanted - allocator.available_size())  # a restore's slots are free at once
            evicted += self._evict(EvictParams(num_tokens=lacking))
        return EvictResult(num_tokens_evicted=evicted)

    @contextmanager
    def taking(self, tokens: Callable[[], int]) -> Iterator[None]:
        """So many tokens are about to be allocated, though SGLang may ask for more to be free.

        Args:
            tokens: called only where they are not free.
        """
        self._enough = tokens
        try:
            yield
        finally:
            self._enough = None

    def _evict(self, params: EvictParams) -> int:
        """As in the base class, and the tiers are told; how many tokens went."""
        evicted = super().evict(params).num_tokens_evicted
        for prefix, branches, tenant in self._dropped.take():
            self.bridge.evicted(prefix, branches, tenant)
        return evicted

    def _delete_leaf(self, node: TreeNode) -> None:
        self.evictions += 1
        if self.bridge.wants_evictions:
            self._dropped.add(node)
        super()._delete_leaf(node)

    def reset(self) -> None:
        if self._bridge is not None:
            self.evictions += 1
            self._bridge.device_reset()
        super().reset()

    def protected_size(self) -> int:
        """Locked tokens, and those that a restore is filling: allocated, but in no tree yet."""
        return super().protected_size() + self.bridge.restores.running.tokens

    # -- DeviceTree ------------------------------------------------------------------------------

    def match_tokens(self, tokens: array[int], tenant: str | None) -> DeviceMatch:
        key = RadixKey(tokens, tenant)
        result = self._cut(key, super().match_prefix(MatchPrefixParams(key=key)))
        return DeviceMatch(result.device_indices, result.last_device_node)

    def match_length(self, tokens: array[int], tenant: str | None) -> int:
        """As :meth:`match_tokens` without its slots, which would be put together on the device, and a node split."""
        key, node = RadixKey(tokens, tenant).page_aligned(self.page_size), self.root_node
        now, length = time.monotonic(), 0
        while len(key) and (child := node.children.get(key.child_key(self.page_size))):
            child.last_access_time = now
            matched = child.key.match(key, page_size=self.page_size)
            length += matched
            if matched < len(child.key):
                break
            node, key = child, key[matched:]
        return length - length % CHUNK_TOKENS

    def lock(self, node: TreeNode) -> None:
        self.inc_lock_ref(node)

    def unlock(self, node: TreeNode) -> None:
        self.dec_lock_ref(node)

    def allocate(self, count: int) -> torch.Tensor | None:
        allocator = self.token_to_kv_pool_allocator
        lacking = count - allocator.available_size()
        if lacking > 0:
            # Hundreds of leaves may go: their slots are added to the free ones in one piece.
            with _freed_together(allocator):
                self._evict(EvictParams(num_tokens=lacking))  # a restore does not take the pins of another
        slots: torch.Tensor | None = allocator.alloc(count)
        return slots

    def free(self, slots: torch.Tensor) -> None:
        # They are whole pages in order: then the device need not be asked which pages these are.
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)

    def insert_tokens(
        self, tokens: array[int], tenant: str | None, slots: torch.Tensor
    ) -> tuple[int, TreeNode]:
        self.bridge.kv_arrives()
        result = super().insert(InsertParams(key=RadixKey(tokens, tenant), value=slots))
        return result.prefix_len, result.last_device_node

    def room(self) -> int:
        return int(self.token_to_kv_pool_allocator.available_size() + self.evictable_size())

    def capacity(self) -> int:
        return int(self.token_to_kv_pool_allocator.size)

    # -- the scheduler's protocol ----------------------------------------------------------------

    @property
    def ongoing_prefetch(self) -> dict[str, int]:
        restores = len(self.bridge.restores.running)
        return {"restores": restores} if restores else {}

    def check_hicache_events(self) -> None:
        self.bridge.tick()

    def ready_to_load_host_cache(self) -> int:
        return -1  # what passes wait for is not chosen for a batch (Bridge.one_pass)

    def check_prefetch_progress(self, rid: str) -> bool:
        return self.bridge.restores.may_be_admitted(rid)

    def pop_prefetch_loaded_tokens(self, _rid: str) -> int:
        return 0  # reported by :func:`report_cached_tokens` when the request is admitted

    def release_aborted_request(self, rid: str) -> None:
        self.bridge.restores.drop(rid)

    def release_host_resources(self) -> None:
        self.bridge.close()


def _check_pools(pool: Any, table: Any, shape: ModelShape, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a model whose state is not K and V of each token, in slots of a pool that we know.

    Where it is, a restored prefix is to SGLang what a prefix in its own radix cache is: slots with the same bytes.

    Raises:
        ConfigError: what is another.
    """
    found = None
    if type(pool) is not MHATokenToKVPool:
        found = f"its KV pool is a {type(pool).__name__}, not a plain MHATokenToKVPool"
    elif pool.kv_cache_layout != "nhd":
        found = f"its KV pool has the layout {pool.kv_cache_layout}, not nhd"
    elif pool.is_quantized_kv_cache:
        found = "its KV pool quantises K and V"
    elif type(table) is not ReqToTokenPool:
        found = f"its requests keep more than K and V ({type(table).__name__})"
    elif pool.dtype not in dtypes:
        found = f"its KV pool keeps {pool.dtype}, not {' or '.join(map(str, dtypes))}"
    elif (pool.start_layer, pool.layer_num) != (0, shape.num_layers):
        found = f"{pool.layer_num} of its {shape.num_layers} layers keep K and V"
    elif (pool.head_num, pool.head_dim, pool.v_head_dim) != (shape.num_kv_heads, *(shape.head_size,) * 2):
        found = (
            f"its pool has {pool.head_num} heads of {pool.head_dim} and {pool.v_head_dim} values for K and V, not "
            f"{shape.num_kv_heads} of {shape.head_size} as its configuration says"
        )
    if found is not None:
        raise ConfigError(
            f"--hierarchical-cache hcache does not support this model: {found}. Serve it with --hierarchical-cache off"
        )


class HostTierView:
    """What SGLang's metrics read of a host pool, in tokens."""

    def __init__(self, bridge: Bridge) -> None:
        self._host = bridge.tiers.host
        self.logical_size = self._host.num_slots * CHUNK_TOKENS

    def available_size(self) -> int:
        return self._host.counts().free * CHUNK_TOKENS


class ControllerView:
    """What SGLang reads of a cache controller: the name of the storage in ``cached_tokens_details``."""

    storage_backend = type("hcache", (), {})()


class DevicePool:
    """K and V rows in SGLang's KV pool."""

    def __init__(self, pool: MHATokenToKVPool) -> None:
        self._pool = pool
        self.dtype: torch.dtype = pool.dtype
        self._holds_bytes = pool.store_dtype is not pool.dtype  # torch cannot index FP8 to write to it

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for buffer, rows in zip(self.buffers(layer), (key, value), strict=True):
            buffer[slots] = rows.view(torch.uint8) if self._holds_bytes else rows

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.k_buffer[layer], self._pool.v_buffer[layer]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (buffer[slots].view(self.dtype) for buffer in self.buffers(layer))
        return key, value
