"""What it takes to find out whether a tier has a prompt: its keys, and a look into memory, for a large disk tier."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from sglang_hcache.core.config import IOEngineName, WritePolicy
from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, RUN_CHUNKS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, StoreConfig
from sglang_hcache.store.format.geometry import shape_of
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.segments import Segment, StoredRun
from sglang_hcache.testing.open_store import Inside
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

_RUNS_OF_SEGMENT = 256
_LAYER_BYTES = (2**16,) * 24
_ROUNDS = 21
_ROOT = Namespace(b"model", "layout").root_key()


@dataclass(frozen=True, slots=True)
class Lookup:
    """Medians, seconds, and what the catalog takes, bytes."""

    keys_s: float
    match_s: float
    catalog_bytes: int


def measure_lookup(num_chunks: int, prompt_tokens: int) -> Lookup:
    """A prompt that is on disk as a whole, among ``num_chunks`` chunks that are not in the processor's caches."""
    draw = random.Random(0)
    prompts = [array("q", draw.choices(range(2**15), k=prompt_tokens)) for _ in range(_ROUNDS)]
    keys_s, match_s = [], []
    with TemporaryDirectory() as folder, _opened(Path(folder)) as (disk, tiers):
        gc.collect()
        before = psutil.Process().memory_info().rss
        _fill(disk, num_chunks, prompts)
        gc.collect()
        catalog_bytes = psutil.Process().memory_info().rss - before
        for prompt in prompts:
            began = time.perf_counter()
            keys = chunk_keys(_ROOT, prompt)
            between = time.perf_counter()
            found = tiers.match(keys)
            match_s.append(time.perf_counter() - between)
            keys_s.append(between - began)
            assert found == len(keys)
    return Lookup(statistics.median(keys_s), statistics.median(match_s), catalog_bytes)


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[DiskStore, TieredStore]]:
    """A disk tier in ``folder``, and both tiers, empty."""
    observer = Counters()
    config = StoreConfig(
        dirs=(folder,),
        size_bytes=2**26,
        free_floor_bytes=0,
        segment_bytes=2**20,
        io_engine=IOEngineName.POSIX,
    )
    disk = DiskStore.open(config, observer)
    layout = StateLayout((Method.HIDDEN,), (8,))
    host = HostTier(np.zeros(64 * layout.chunk_bytes, np.uint8), layout, observer, keep_dirty=True)
    tiers = TieredStore(host, disk, observer, write_policy=WritePolicy.WRITE_BACK, run_chunks=RUN_CHUNKS)
    with closing(tiers):
        yield disk, tiers


def _fill(disk: DiskStore, num_chunks: int, prompts: list[array[int]]) -> None:
    """Names in the catalog, ``prompts`` spread over them; nothing is on disk."""
    others = max(0, num_chunks // len(prompts) - len(prompts[0]) // CHUNK_TOKENS)
    filling = _Filling(Inside(disk))
    for prompt in prompts:
        filling.add([os.urandom(32) for _ in range(others)])
        filling.add(chunk_keys(_ROOT, prompt))


class _Filling:
    """Puts runs into segments, as a store does."""

    def __init__(self, inside: Inside) -> None:
        self._catalog, self._volumes = inside.catalog, inside.volumes
        self._segment = Segment(0, self._volumes, (0,), 0)
        self._num_runs = 0

    def add(self, keys: list[bytes]) -> None:
        for first in range(0, len(keys), RUN_CHUNKS):
            if self._num_runs % _RUNS_OF_SEGMENT == 0:
                self._segment = Segment(self._num_runs, self._volumes, (0,), 0)
                self._catalog.add_segment(self._segment)
            self._num_runs += 1
            part = tuple(keys[first : first + RUN_CHUNKS])
            shape = shape_of(len(part), _LAYER_BYTES, 1, (0,), 0)
            place = RunPlace(
                os.urandom(16), bytes(16), part, first, shape, self._segment.number, (self._num_runs,)
            )
            self._catalog.adopt_run(StoredRun(place, self._segment))
