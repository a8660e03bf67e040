"""What saving costs while tokens are computed: in two stages, or written directly.

[HCache §4.2.2, Figure 14]: in a forward pass rows come layer by layer, a chunk wants 64 rows of one request. In two
stages (``capture/``, ``tier/``, ``store/`` as in the server) a pass only copies its rows into a ring in host memory,
and threads assemble them to chunks and write those in large pieces. Directly means: each layer's rows of each request
go to their place in a file before the pass goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from counted_disk import open_disk
from restore_rig import RUN_CHUNKS, Rig
from sglang.benchmark.one_batch import decode, extend, prepare_synthetic_inputs_for_latency_test

from sglang_hcache.capture.assembler import Assembler
from sglang_hcache.capture.events import RequestBegins, RequestEnds, RequestRows
from sglang_hcache.capture.staging import StagingRing
from sglang_hcache.capture.tap import Tap
from sglang_hcache.core.config import WritePolicy
from sglang_hcache.core.keys import Namespace, chunk_keys
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, StateLayout
from sglang_hcache.core.observer import Counters
from sglang_hcache.device.memory import host_buffer
from sglang_hcache.store.io.engine import IOKind
from sglang_hcache.tier.host import HostTier
from sglang_hcache.tier.tiered import TieredStore

OFF, TWO_STAGE, CACHED, DIRECT = "off", "two-stage", "direct, page cache", "direct"
"""Nothing is saved; as the server does; written directly into the page cache; written directly to the device."""
HOST_BYTES = 512 * 2**20
PASSES = 3
"""Prompts that are computed one after the other where prefill is measured."""


@dataclass(frozen=True)
class Place:
    """Rows [first, first + count) of a pass go to byte ``offset`` of their request's file."""

    first: int
    count: int
    offset: int


def places(rows: RequestRows, layout: StateLayout, layer: int) -> Iterator[Place]:
    """Where one layer's rows of a request belong: chunk after chunk, layer-major inside each."""
    done = 0
    while done < rows.count:
        chunk, row = divmod(rows.position + done, CHUNK_TOKENS)
        count = min(CHUNK_TOKENS - row, rows.count - done)
        offset = chunk * layout.chunk_bytes + layout.layer_offset(layer) + row * layout.row_bytes[layer]
        yield Place(rows.row + done, count, offset)
        done += count


class Saver(Protocol):
    """One way to save the hidden states of all layers."""

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        """Requests start, each with at most ``num_tokens`` tokens."""

    def begin_pass(self, rows: Sequence[RequestRows]) -> None: ...

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        """One layer's rows, (rows of the pass, hidden size), in the middle of the pass."""

    def end_pass(self, tokens: array[int]) -> None:
        """The pass is over; ``tokens`` has one entry a row."""

    def end(self) -> None:
        """The requests are over; returns when everything is saved."""

    def counts(self) -> tuple[int, int]:
        """Writes and bytes since the last call."""

    def digest(self, rid: str, tokens: array[int]) -> str:
        """Of what is saved of the whole chunks of a request of the latest :meth:`begin`."""

    def close(self) -> None: ...


class TwoStageSaver:
    """The project's own parts, put together as a server with ``write_through`` has them."""

    def __init__(self, rig: Rig, folder: Path, largest_pass: int) -> None:
        self._layout = rig.model.layout((Method.HIDDEN,) * rig.num_layers)
        self.observer = Counters()
        self._disk, self._writes = open_disk(folder, IOKind.WRITE)
        slots = max(64, HOST_BYTES // self._layout.chunk_bytes)
        arena = host_buffer(slots * self._layout.chunk_bytes).reshape(slots, -1)
        ring = [
            torch.from_numpy(host_buffer(group.count * 2 * largest_pass * group.row_bytes))
            .view(rig.model.dtype)
            .view(group.count, 2 * largest_pass, -1)
            for group in self._layout.groups
        ]
        for memory in (torch.from_numpy(arena), *ring):
            memory.zero_()  # a server that has run for a while has all its pages
        host = HostTier(arena, self._layout, self.observer, keep_dirty=True)
        self._tiers = TieredStore(
            host, self._disk, self.observer, write_policy=WritePolicy.WRITE_THROUGH, run_chunks=RUN_CHUNKS
        )
        staging = StagingRing(ring)
        self._assembler = Assembler(staging, self._tiers, rig.model.dtype, self.observer)
        self._tap = Tap(staging, self._assembler.publish, self.observer)
        self._rows: Sequence[RequestRows] = ()
        self._rids: Sequence[str] = ()
        self._sessions = 0

    def _namespace(self, rid: str) -> Namespace:
        return Namespace(b"saving", "saving", tenant=f"{self._sessions} {rid}")

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        self._sessions += 1  # a namespace of its own: what is stored already would not be saved
        self._rids = rids
        for rid in rids:
            self._assembler.publish(RequestBegins(rid, self._namespace(rid), array("q")))

    def begin_pass(self, rows: Sequence[RequestRows]) -> None:
        self._rows = rows
        self._tap.begin_pass(sum(each.count for each in rows))

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        self._tap.layer(index, hidden)

    def end_pass(self, tokens: array[int]) -> None:
        self._tap.end_pass(self._rows, tokens)

    def end(self) -> None:
        for rid in self._rids:
            self._assembler.publish(RequestEnds(rid))
        while self._assembler.is_busy or self._tiers.is_saving:
            time.sleep(0.001)

    def counts(self) -> tuple[int, int]:
        return self._writes.take()

    def digest(self, rid: str, tokens: array[int]) -> str:
        keys = chunk_keys(self._namespace(rid).root_key(), tokens)
        sizes = self._layout.chunk_layer_bytes
        state = np.empty((len(keys), self._layout.chunk_bytes), np.uint8)
        with self._disk.lease(tuple(keys)) as lease:
            for layer, size in enumerate(sizes):
                out = host_buffer(len(keys) * size)
                self._disk.read_layer(lease, layer, out)
                first = self._layout.layer_offset(layer)
                state[:, first : first + size] = out.reshape(len(keys), size)
        return hashlib.blake2b(state).hexdigest()

    def close(self) -> None:
        self._assembler.close()
        self._tiers.close()


class DirectSaver:
    """Writes rows where they belong, in the middle of the pass: one file a request.

    Args:
        to_device: past the page cache, so that each write waits for the device.
    """

    def __init__(self, rig: Rig, folder: Path, largest_pass: int, *, to_device: bool) -> None:
        folder.mkdir()
        self._folder = folder
        self._layout = rig.model.layout((Method.HIDDEN,) * rig.num_layers)
        self._flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        row_bytes = self._layout.row_bytes[0]
        self._memory = host_buffer(largest_pass * row_bytes).reshape(largest_pass, row_bytes)
        if to_device:
            self._flags |= os.O_DIRECT if takes_direct(folder, row_bytes) else os.O_DSYNC
        self._files: dict[str, int] = {}
        self._rows: Sequence[RequestRows] = ()
        self._writes = self._bytes = 0

    def begin(self, rids: Sequence[str], num_tokens: int) -> None:
        self._close_files()
        size = -(-num_tokens // CHUNK_TOKENS) * self._layout.chunk_bytes
        for rid in rids:
            self._files[rid] = os.open(self._folder / rid, self._flags, 0o600)
            os.posix_fallocate(self._files[rid], 0, size)

    def begin_pass(self, rows: Sequence[RequestRows]) -> None:
        self._rows = rows

    def layer(self, index: int, hidden: torch.Tensor) -> None:
        rows = self._memory[: len(hidden)]
        torch.from_numpy(rows).copy_(hidden.contiguous().view(torch.uint8))  # O_DIRECT wants aligned memory
        for each in self._rows:
            file = self._files[each.rid]
            for place in places(each, self._layout, index):
                data = rows[place.first : place.first + place.count]
                written = os.pwrite(file, data.data, place.offset)
                assert written == data.nbytes
                self._writes += 1
                self._bytes += written

    def end_pass(self, tokens: array[int]) -> None: ...

    def end(self) -> None: ...

    def counts(self) -> tuple[int, int]:
        found = self._writes, self._bytes
        self._writes = self._bytes = 0
        return found

    def digest(self, rid: str, tokens: array[int]) -> str:
        size = len(tokens) // CHUNK_TOKENS * self._layout.chunk_bytes
        with (self._folder / rid).open("rb") as file:
            return hashlib.blake2b(file.read(size)).hexdigest()

    def close(self) -> None:
        self._close_files()

    def _close_files(self) -> None:
        for rid, file in self._files.items():
            os.close(file)
            (self._folder / rid).unlink()
        self._files.clear()


def takes_direct(folder: Path, row_bytes: int) -> bool:
    """Whether the file system in ``folder`` writes single rows with O_DIRECT."""
    path = folder / "try"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwrite(file, host_buffer(row_bytes).data, row_bytes) == row_bytes
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()


@dataclass
class SavingRow:
    """One way to save at one load; medians over rounds, in seconds."""

    load: str
    """``prefill`` or ``decode``."""
    size: int
    """Tokens of the prompt, or requests that decode together."""
    variant: str
    seconds: float = 0.0
    """Of one prompt, or between two tokens (TBT), mean of a round."""
    p99_s: float = 0.0
    """Of single passes of all rounds."""
    ratio: float = 1.0
    """Time over that of ``off`` in the same round: the median, and the range over rounds."""
    ratio_min: float = 1.0
    ratio_max: float = 1.0
    writes: int = 0
    """Of one round, and their bytes."""
    write_bytes: int = 0
    tokens: int = 0
    """Computed in one round: all of them are to be saved."""
    drain_s: float = 0.0
    """From the end of a round until everything is saved."""
    dropped: int = 0
    """Rows that were not saved because staging was full, in all rounds."""
    digest: str = ""
    """Of what was saved of the first request's whole chunks."""
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SavingSettings:
    batches: tuple[int, ...]
    prompt: int
    """Tokens before decoding begins, at least."""
    steps: int
    prefill: int
    """Tokens of the prompt whose prefill is measured, one pass."""
    rounds: int
    folder: Path


@dataclass
class Session:
    """What one variant took in one round."""

    passes_s: list[float]
    drain_s: float
    tokens: array[int]
    """Of the first request."""
    num_tokens: int


def measure_saving(settings: SavingSettings, rig: Rig, step: Callable[[], None]) -> list[SavingRow]:
    """Prefill and every batch size, each with every variant in turn; ``step`` is called after each round."""
    largest = max(settings.prefill, max(settings.batches) * (settings.prompt + CHUNK_TOKENS))
    savers: dict[str, Saver | None] = {
        OFF: None,
        TWO_STAGE: (two_stage := TwoStageSaver(rig, settings.folder / "two-stage", largest)),
        CACHED: DirectSaver(rig, settings.folder / "cached", largest, to_device=False),
        DIRECT: DirectSaver(rig, settings.folder / "direct", largest, to_device=True),
    }
    rows: list[SavingRow] = []
    loads = [("prefill", settings.prefill), *(("decode", batch) for batch in settings.batches)]
    for load, size in loads:
        of_load = {name: SavingRow(load, size, name) for name in savers}
        passes: dict[str, list[float]] = {name: [] for name in savers}
        for number in range(-1, settings.rounds):  # the first one warms up
            order = list(savers)[number % len(savers) :] + list(savers)[: number % len(savers)]
            for name in order:
                before = two_stage.observer["capture.rows_dropped_staging_full"]
                session = _session(rig, savers[name], *_prompts(rig, settings, load, size))
                _note(of_load[name], session, savers[name], is_first=number < 0)
                of_load[name].dropped += two_stage.observer["capture.rows_dropped_staging_full"] - before
                if number >= 0:
                    passes[name] += session.passes_s
            step()
        for name, row in of_load.items():
            _summarise(row, passes[name], of_load[OFF])
        rows += of_load.values()
    for saver in savers.values():
        if saver is not None:
            saver.close()
    return rows


def _prompts(rig: Rig, settings: SavingSettings, load: str, size: int) -> tuple[list[list[int]], int, int]:
    """Prompts, decode steps, and how often."""
    if load == "prefill":
        return [rig.tokens[: settings.prefill].tolist()], 0, PASSES
    numbers = random.Random(size)
    # Lengths differ, so that not all requests fill their chunks in the same step.
    lengths = [settings.prompt + index * CHUNK_TOKENS // size for index in range(size)]
    return [numbers.choices(range(rig.model.vocabulary), k=length) for length in lengths], settings.steps, 1


def _note(row: SavingRow, session: Session, saver: Saver | None, *, is_first: bool) -> None:
    if saver is not None:
        row.writes, row.write_bytes = saver.counts()
    if is_first:
        row.digest = "" if saver is None else saver.digest("0", session.tokens)
        return
    row.times.append(statistics.fmean(session.passes_s))
    row.tokens, row.drain_s = session.num_tokens, max(row.drain_s, session.drain_s)


def _summarise(row: SavingRow, passes: Sequence[float], off: SavingRow) -> None:
    ratios = [mine / other for mine, other in zip(row.times, off.times, strict=True)]
    row.seconds, row.p99_s = statistics.median(row.times), float(np.percentile(passes, 99))
    row.ratio, row.ratio_min, row.ratio_max = statistics.median(ratios), min(ratios), max(ratios)


def _session(rig: Rig, saver: Saver | None, prompts: list[list[int]], steps: int, times: int) -> Session:
    """Compute ``prompts`` in one pass, ``times`` times, then decode ``steps`` tokens of each."""
    passes: list[float] = []
    num_tokens = 0
    handles = [] if saver is None else rig.model.watch(range(rig.num_layers), saver.layer)
    for _ in range(times):
        with torch.inference_mode():
            passes += _run(rig, saver, prompts, steps, tokens := [array("q", prompt) for prompt in prompts])
        num_tokens += sum(map(len, tokens))
    for handle in handles:
        handle.remove()
    began = time.monotonic()
    if saver is not None:
        saver.end()
    return Session(passes, time.monotonic() - began, tokens[0], num_tokens)


def _run(
    rig: Rig, saver: Saver | None, prompts: list[list[int]], steps: int, tokens: list[array[int]]
) -> list[float]:
    """Seconds of the prompts' pass if there are no steps, else of each step. Adds what was decoded to ``tokens``."""
    runner = rig.runner
    requests = prepare_synthetic_inputs_for_latency_test(len(prompts), len(prompts[0]), prompts)
    rids = [str(index) for index in range(len(prompts))]
    if saver is not None:
        saver.begin(rids, max(map(len, prompts)) + steps)
    starts = np.cumsum([0, *map(len, prompts)]).tolist()
    rows = [
        RequestRows(rid, 0, start, len(prompt))
        for rid, start, prompt in zip(rids, starts[:-1], prompts, strict=True)
    ]
    new = array("q", itertools.chain.from_iterable(prompts))
    (next_ids, _, batch), seconds = _timed(saver, rows, new, partial(extend, requests, runner))
    passes = [] if steps else [seconds]
    for _ in range(steps):
        new = array("q", next_ids.tolist())
        rows = [RequestRows(rid, len(tokens[row]), row, 1) for row, rid in enumerate(rids)]
        for row, token in enumerate(new):
            tokens[row].append(token)
        (next_ids, _), seconds = _timed(saver, rows, new, partial(decode, next_ids, batch, runner))
        passes.append(seconds)
    _free(runner, requests, tokens)
    return passes


def _timed(
    saver: Saver | None, rows: list[RequestRows], new: array[int], run: Callable[[], Any]
) -> tuple[Any, float]:
    """One pass over the tokens ``new``, with what saving does before and after it."""
    began = time.monotonic()
    if saver is not None:
        saver.begin_pass(rows)
    result = run()
    if saver is not None:
        saver.end_pass(new)
    return result, time.monotonic() - began


def _free(runner: Any, requests: Sequence[Any], tokens: Sequence[array[int]]) -> None:
    for request, known in zip(requests, tokens, strict=True):
        slots = runner.req_to_token_pool.req_to_token[request.req_pool_idx, : len(known)]
        runner.token_to_kv_pool_allocator.free(slots.to(torch.int64))
        runner.req_to_token_pool.free(request)
