"""What it takes to find out whether a tier has a prompt: its keys, and a look into the catalog of a large disk tier."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from array import array
from dataclasses import dataclass

import psutil

from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.store.catalog import Catalog
from sglang_hcache.store.format.rows import RunPlace
from sglang_hcache.store.segments import Segment, StoredRun

_RUN_CHUNKS = 16
_RUNS_OF_SEGMENT = 256
_LAYER_BYTES = (2**16,) * 24
_ROUNDS = 21
_ROOT = Namespace(b"model", "layout").root_key()


@dataclass(frozen=True, slots=True)
class Lookup:
    """Medians, seconds, and what the catalog takes, bytes."""

    keys_s: float
    match_s: float
    index_bytes: int


def measure_lookup(num_chunks: int, prompt_tokens: int) -> Lookup:
    """A prompt that is there as a whole, among ``num_chunks`` chunks that are not in the processor's caches."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    catalog, prompts = _filled_catalog(num_chunks, prompt_tokens)
    gc.collect()
    index_bytes = psutil.Process().memory_info().rss - before
    keys_s, match_s = [], []
    for prompt in prompts:
        began = time.perf_counter()
        keys = chunk_keys(_ROOT, prompt)
        between = time.perf_counter()
        found = catalog.match(keys)
        match_s.append(time.perf_counter() - between)
        keys_s.append(between - began)
        assert found == len(keys)
    return Lookup(statistics.median(keys_s), statistics.median(match_s), index_bytes)


def _filled_catalog(num_chunks: int, prompt_tokens: int) -> tuple[Catalog, list[array[int]]]:
    """A catalog as a store has it, and prompts that are in it, spread over it; nothing is on disk."""
    draw = random.Random(0)
    prompts = [array("q", draw.choices(range(2**15), k=prompt_tokens)) for _ in range(_ROUNDS)]
    others = max(0, num_chunks // len(prompts) - prompt_tokens // CHUNK_TOKENS)
    filling = _Filling()
    for prompt in prompts:
        filling.add([os.urandom(32) for _ in range(others)])
        filling.add(chunk_keys(_ROOT, prompt))
    return filling.catalog, prompts


class _Filling:
    """Puts runs into segments, as a store does."""

    def __init__(self) -> None:
        self.catalog = Catalog(2**14, num_stripes=1)
        self._segment = Segment(0, [], (0,), 0)
        self._num_runs = 0

    def add(self, keys: list[bytes]) -> None:
        for first in range(0, len(keys), _RUN_CHUNKS):
            if self._num_runs % _RUNS_OF_SEGMENT == 0:
                self._segment = Segment(self._num_runs, [], (0,), 0)
                self.catalog.add_segment(self._segment)
            self._num_runs += 1
            part = tuple(keys[first : first + _RUN_CHUNKS])
            shape = self.catalog.shapes.get(len(part), _LAYER_BYTES, (0,), 0)
            place = RunPlace(
                os.urandom(16), bytes(16), part, first, shape, self._segment.number, (self._num_runs,)
            )
            self.catalog.adopt_run(StoredRun(place, self._segment, self._num_runs))
