"""What checks and measurements before serving borrow: slots of the KV pool, and chunks that nobody asks for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.errors import ConfigError, StoreError
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.restore.pipeline import NUM_READERS, STEP_BYTES, layers_of_steps
from sglang_hcache.sglang_plugin.seam.protocols import DeviceTree
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.store.config import SCRATCH_NAMESPACE
from sglang_hcache.tier.chunk import ChunkInfo
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

NUM_LAYERS = 6
"""Layers that are read or computed to measure one: a restore works on several at once."""


def take_slots(tree: DeviceTree, count: int) -> torch.Tensor:
    """At least ``count`` slots of the KV pool, in whole chunks, to be freed afterwards.

    Raises:
        ConfigError: it does not have so many.
    """
    count = -(-count // CHUNK_TOKENS) * CHUNK_TOKENS
    slots = tree.allocate(count)
    if slots is None:
        raise ConfigError(
            f"the KV pool of {tree.capacity():,} tokens is too small for the checks at start, which need {count:,} "
            "more at once: raise --max-total-tokens or --mem-fraction-static"
        )
    return slots


class ScratchReads:
    """Chunks of a few equal layers, and reading them.

    Args:
        method: what the rows are, for the chunks' names.
        row_bytes: bytes of one token in one layer.
        count: chunks.
        disk: the store that takes them, until :meth:`close`; None: memory of our own.
        together: layers that a restore of the model reads together at most.

    Raises:
        StoreError: the disk does not take them.
    """

    def __init__(
        self,
        method: Method,
        row_bytes: int,
        count: int,
        disk: DiskStore | None,
        together: int,
    ) -> None:
        self._layout = layout = StateLayout((method,) * NUM_LAYERS, (row_bytes,) * NUM_LAYERS)
        # No real key looks like this: those are digests.
        self._keys = [
            b"profile" + method.encode().ljust(9) + index.to_bytes(16, "little") for index in range(count)
        ]
        self.longest = CHUNK_TOKENS * count
        self._together = min(together, NUM_LAYERS // 2)  # two steps at least, as one is read behind another
        self._disk = disk
        self._tier = self._filled_host(count) if disk is None else disk
        if disk is not None:
            try:
                self._fill_disk(disk)
            except StoreError:
                disk.discard_new()
                raise
        self._buffers = [host_buffer(count * layout.chunk_layer_bytes[0]) for _ in range(NUM_LAYERS)]
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="hcache-scratch")

    def time(self, length: int) -> float:
        """Seconds of one layer of ``length`` tokens, when several are read one after the other.

        From a disk they come from the device, without O_DIRECT as well: what the page cache holds now is no promise of
        what it holds when a prompt is asked for again.

        Raises:
            StoreError: it cannot be read.
        """
        count = length // CHUNK_TOKENS
        size = count * self._layout.chunk_layer_bytes[0]
        steps = layers_of_steps(dict.fromkeys(range(NUM_LAYERS), size), STEP_BYTES, self._together)
        if self._disk is not None:
            self._disk.drop_cached(self._keys[:count])
        with self._tier.lease(self._keys[:count]) as lease:
            began = time.monotonic()
            reads = [
                self._readers.submit(
                    self._tier.read_layers, lease, {layer: self._buffers[layer][:size] for layer in step}
                )
                for step in steps
            ]
            for read in reads:
                read.result()
            return (time.monotonic() - began) / NUM_LAYERS

    def close(self) -> None:
        """Stop the reading threads, and remove the chunks from the disk."""
        self._readers.shutdown()
        if self._disk is not None:
            self._disk.discard_new()

    def _filled_host(self, count: int) -> TieredStore:
        memory = np.ones(count * self._layout.chunk_bytes, np.uint8)  # touched: a read brings no pages in
        host = HostTier(memory, self._layout, Counters(), keep_dirty=False)
        tiers = TieredStore(host, None, Counters(), write_policy=WritePolicy.WRITE_BACK, run_chunks=1)
        for index, key in enumerate(self._keys):
            slot = tiers.reserve()
            assert slot is not None
            tiers.seal(slot, ChunkInfo(key, bytes(32), index, SCRATCH_NAMESPACE))
        return tiers

    def _fill_disk(self, disk: DiskStore) -> None:
        size = self._layout.chunk_layer_bytes[0]
        for first in range(0, len(self._keys), RUN_CHUNKS):
            keys = tuple(self._keys[first : first + RUN_CHUNKS])
            rows = np.random.default_rng(first).integers(0, 256, (len(keys), size), dtype=np.uint8)
            run = Run(SCRATCH_NAMESPACE, keys, first, self._layout.chunk_layer_bytes)
            disk.write_run(run, lambda _layer, rows=rows: list(rows))
