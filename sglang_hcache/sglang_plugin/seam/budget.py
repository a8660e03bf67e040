"""What the configured sizes come to for a model; checked before a server is built, used when it is."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from typing import Any

from sglang_hcache.core.config import (
    HOST_PARTS,
    STAGED_PASSES,
    STAGED_PASSES_AHEAD,
    STAGING_PARTS,
    HCacheConfig,
)
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, StateLayout
from sglang_hcache.core.units import format_bytes
from sglang_hcache.device.memory import available_host_bytes
from sglang_hcache.restore.pipeline import NUM_BUFFERS, buffer_bytes
from sglang_hcache.store import MAX_LAYERS, StoreConfig

MOST_BLOCK_CHUNKS = 64
"""Chunks that a restore reads at a time, at most: one layer of 4,096 tokens is a large read."""
_FEWEST_SLOTS = 16
_RUN_SHARE = 1 / 8
"""The share of the disk tier that one run may take."""


@dataclass(frozen=True, slots=True)
class HostBudget:
    """How ``host_size`` is divided: rows of the staging ring, slots of one chunk each, buffers to read into."""

    ring_rows: int
    num_slots: int
    block_chunks: int
    """Most chunks that a restore works with at once: buffers for them take at most ``1 / HOST_PARTS`` of the whole."""

    @classmethod
    def least(cls) -> HostBudget:
        """For a tier that holds nothing."""
        return cls(CHUNK_TOKENS, 1, 1)

    @classmethod
    def of(
        cls,
        config: HCacheConfig,
        layout: StateLayout,
        *,
        pass_rows: int,
        staged_passes: int,
        num_ranks: int = 1,
        available: int | None = None,
    ) -> HostBudget:
        """Divide it.

        Args:
            pass_rows: most rows of one pass (:func:`pass_rows_of`).
            staged_passes: that staging should hold (:func:`staged_passes_of`).
            num_ranks: that take as much, and have not yet.
            available: host memory for all of them, bytes; None: what there is now.

        Raises:
            ConfigError: more than this machine has, or too little for this model.
        """
        available = available_host_bytes() if available is None else available
        whole = num_ranks * config.host_size
        if whole > available:
            raise ConfigError(
                f"--hcache-host-size: {format_bytes(whole)} is not allowed; this machine has "
                f"{format_bytes(available)} available; lower it, or on a CPU give SGLang's KV pool less "
                "(--max-total-tokens)"
            )
        one_chunk = NUM_BUFFERS * buffer_bytes(layout, 1)
        block_chunks = max(1, min(MOST_BLOCK_CHUNKS, config.host_size // HOST_PARTS // one_chunk))
        row_bytes = sum(layout.row_bytes)
        staging = config.staging_size
        if staging is None:
            staging = min(
                config.host_size // STAGING_PARTS, staged_passes * max(pass_rows, CHUNK_TOKENS) * row_bytes
            )
        # What is read comes from a disk.
        buffers = block_chunks * one_chunk if config.dirs else 0
        for_slots = config.host_size - staging - buffers
        budget = cls(staging // row_bytes, for_slots // layout.chunk_bytes, block_chunks)
        if budget.ring_rows < CHUNK_TOKENS or budget.num_slots < _FEWEST_SLOTS:
            least = (config.staging_size or 0) + layout.chunk_bytes * (_FEWEST_SLOTS + 1) * 2
            raise ConfigError(
                f"--hcache-host-size: {format_bytes(whole)} is not allowed; {CHUNK_TOKENS} tokens of "
                f"this model take {format_bytes(num_ranks * layout.chunk_bytes)}, so give at least "
                f"{format_bytes(num_ranks * least)}"
            )
        return budget


def longest_run(layout: StateLayout, disk_bytes: int) -> int:
    """Most chunks of a disk run: fewer than usual where one would need much of a small disk to itself.

    Raises:
        ConfigError: the model has more layers than the disk tier can store.
    """
    if layout.num_layers > MAX_LAYERS:
        raise ConfigError(
            f"--hcache-dirs: the model has {layout.num_layers} layers, and the disk tier stores at most {MAX_LAYERS}; "
            "leave it out"
        )
    return max(1, min(RUN_CHUNKS, int(disk_bytes * _RUN_SHARE) // layout.chunk_bytes))


def pool_share(config: HCacheConfig, sglangs: float) -> float:
    """What SGLang may take of this machine's memory (``--mem-fraction-static``) where ``host_size`` is of the same.

    In thousandths, rounded down: of a large machine one of them is more than some host tiers.

    Args:
        sglangs: what it would take.

    Raises:
        ConfigError: nothing would be left for its KV pool.
    """
    share = math.floor(1000 * (sglangs - config.host_size / available_host_bytes())) / 1000
    if share <= 0:
        raise ConfigError(
            f"--hcache-host-size: {format_bytes(config.host_size)} leaves no memory for SGLang's KV pool; lower it, "
            "or say how much the pool takes (--max-total-tokens)"
        )
    return share


def cuts_prompts(server_args: Any) -> bool:
    """Whether SGLang prefills a long prompt in several passes."""
    return bool(server_args.chunked_prefill_size and server_args.chunked_prefill_size > 0)


def largest_pass_of(server_args: Any) -> int:
    """Most tokens that SGLang prefills in one pass; where it cuts no prompts, in one with several of them."""
    cuts = cuts_prompts(server_args)
    return int(server_args.chunked_prefill_size if cuts else server_args.max_prefill_tokens)


def pass_rows_of(server_args: Any) -> int:
    """Most rows of one pass: of a prefill, or one of each request that decodes, where it is said how many may."""
    return max(largest_pass_of(server_args), server_args.max_running_requests or 0)


def staged_passes_of(server_args: Any) -> int:
    """How many passes that follow each other have rows in staging, as soon as the last of them begins.

    The rows of a pass are on their way into chunks when it has ended, and the next one begins at once. With overlap
    scheduling that one is on the device already, and the one behind it begins: SGLang launches a pass when the last
    but one has ended.
    """
    runs_ahead = server_args.device != "cpu" and not server_args.disable_overlap_schedule
    return STAGED_PASSES_AHEAD if runs_ahead else STAGED_PASSES


def store_config(config: HCacheConfig, hidden_size: int | None = None) -> StoreConfig | None:
    """Settings of the disk tier; None without one.

    Args:
        hidden_size: of the model, where it is known: long contexts of a narrow model are dearer to recompute.

    Raises:
        ConfigError: sizes or directories that the store cannot work with.
    """
    if not config.dirs:
        return None
    floor = config.disk_free_floor
    server = multiprocessing.parent_process()  # of this scheduler; what a user stops
    return StoreConfig(
        dirs=config.dirs,
        size_bytes=config.disk_size,
        free_floor_bytes=floor if isinstance(floor, int) else 0,
        free_floor_percent=0.0 if isinstance(floor, int) else float(floor.rstrip("%")),
        segment_bytes=config.segment_bytes,
        io_engine=config.io_engine,
        io_timeout_s=config.io_timeout_s,
        write_budget_bytes=config.disk_write_budget,
        max_age_s=config.disk_max_age,
        user_pid=None if server is None else server.pid,
        **({} if hidden_size is None else {"cost_doubling_tokens": 6 * hidden_size}),
    )
