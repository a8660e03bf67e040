"""What saving costs while tokens are computed: in two stages, or written directly.

[HCache §4.2.2, Figure 14]: in a forward pass rows come layer by layer, a chunk wants 64 rows of one request. In two
stages (``capture/``, ``tier/``, ``store/`` as in the server) a pass only copies its rows into a ring in host memory,
and threads assemble them to chunks and write those in large pieces. Directly means: each layer's rows of each request
go to their place in a file before the pass goes on.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.benchmark.one_batch import decode, extend, prepare_synthetic_inputs_for_latency_test

from ablation.savers import DirectSaver, Saver, TwoStageSaver
from ablation.settings import IN_A_ROW, OFF, Sizes, Way
from common.statistics import median_with_interval
from common.turns import in_turn
from restoring.rig import Rig
from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import CHUNK_TOKENS

NAMES = {Way.TWO_STAGE: "two-stage", Way.CACHED: "direct, page cache", Way.DIRECT: "direct"}
"""Of the variants that save."""
BLOCK_STEPS = CHUNK_TOKENS
"""Decode passes of one variant before the next one's turn: the speed of a machine wanders by more than saving costs. In
each turn every request completes one chunk, in the middle of it: what is done with a chunk goes on beside later passes
of the turn, as in a server."""
PREFILLS = 3
"""Prompts of each variant in a round where prefill is measured."""


@dataclass
class SavingRow:
    """One way to save at one load, in seconds."""

    load: str
    """``prefill`` (one pass, without what goes on behind it), ``prefills`` (several in a row, until all is saved) or
    ``decode``."""
    size: int
    """Tokens of the prompt, or requests that decode together."""
    variant: str
    seconds: float = 0.0
    """Of one prompt, or between two tokens (TBT): median of the turns."""
    p99_s: float = 0.0
    """Of single passes of all turns."""
    ratio: float = 1.0
    """Time over that of ``off`` next to it: the median of the turns, and its 95 % confidence interval."""
    ratio_low: float = 1.0
    ratio_high: float = 1.0
    writes: int = 0
    """Of one prompt, or of one round of decoding, and their bytes."""
    write_bytes: int = 0
    tokens: int = 0
    """Computed meanwhile: all of them are to be saved."""
    drain_s: float = 0.0
    """From the end of a turn until nothing is being saved; at most. 0 for ``prefills``: it is part of their time."""
    dropped: int = 0
    """Rows that were not saved because staging was full, in all rounds."""
    digest: str = ""
    """Of what was saved of the first request's whole chunks."""
    times: list[float] = field(default_factory=list)
    """Of each turn: of one prompt, or the mean of its passes."""


def measure_saving(
    sizes: Sizes,
    rig: Rig,
    folder: Path,
    step: Callable[[], None],
    on_rows: Callable[[str, int, Sequence[SavingRow]], None],
) -> None:
    """Prefill and every batch size, with the variants in turns.

    Args:
        step: called after each round.
        on_rows: gets the rows of each load and size as soon as it is over.
    """
    largest = max(sizes.prefill, max(sizes.batches) * (sizes.prompt + CHUNK_TOKENS))
    with ExitStack() as stack:
        savers: dict[str, Saver] = {}
        for way in sizes.ways:
            savers[NAMES[way]] = saver = _saver(way, rig, folder / way, largest)
            stack.callback(saver.close)
        for load, size in sizes.loads:
            dropped = {name: saver.rows_dropped for name, saver in savers.items()}
            rows = _measure_load(sizes, rig, {OFF: None, **savers}, load, size, step)
            for name, saver in savers.items():
                rows[name].dropped = saver.rows_dropped - dropped[name]
            on_rows(load, size, list(rows.values()))


def _saver(way: Way, rig: Rig, folder: Path, largest: int) -> Saver:
    if way is Way.TWO_STAGE:
        return TwoStageSaver(rig, folder, largest)
    return DirectSaver(rig, folder, largest, to_device=way is Way.DIRECT)


def _measure_load(
    sizes: Sizes,
    rig: Rig,
    savers: dict[str, Saver | None],
    load: str,
    size: int,
    step: Callable[[], None],
) -> dict[str, SavingRow]:
    rows = {name: SavingRow(load, size, name) for name in savers}
    passes: dict[str, list[float]] = {name: [] for name in savers}
    prompts = _prompts(rig, sizes, load, size)
    turns = itertools.count()

    def turn(sessions: dict[str, Session], run: Callable[[Session], list[float]]) -> None:
        """Every variant once; who comes first changes."""
        for name in in_turn(savers, next(turns)):
            seconds = run(sessions[name])
            passes[name] += seconds
            rows[name].times.append(statistics.fmean(seconds))
            rows[name].drain_s = max(rows[name].drain_s, sessions[name].settle())

    for number in range(-1, sizes.rounds):
        if load == "prefill":
            for _ in range(PREFILLS):
                with _sessions(rig, savers, prompts, 0, rows) as sessions:
                    turn(sessions, lambda session: [session.prefill()])
        elif load == "prefills":
            for name in in_turn(savers, next(turns)):
                with _sessions(rig, {name: savers[name]}, prompts, 0, rows) as sessions:
                    passes[name].append(sessions[name].prefill_each() / IN_A_ROW)
                    rows[name].times.append(passes[name][-1])
        else:
            with _sessions(rig, savers, prompts, sizes.steps, rows) as sessions:
                for session in sessions.values():
                    session.prefill()
                    session.settle()
                for begun in range(0, sizes.steps, BLOCK_STEPS):
                    count = min(BLOCK_STEPS, sizes.steps - begun)
                    turn(sessions, lambda session, count=count: session.decode(count))
        if number < 0:  # warmed up
            for name, row in rows.items():
                row.times.clear()
                passes[name].clear()
        step()
    for name, row in rows.items():
        _summarise(row, passes[name], rows[OFF])
    return rows


def _prompts(rig: Rig, sizes: Sizes, load: str, size: int) -> list[list[int]]:
    if load == "prefill":
        return [rig.tokens[:size].tolist()]
    numbers = random.Random(size)
    if load == "prefills":
        return [numbers.choices(range(rig.model.vocabulary), k=size) for _ in range(IN_A_ROW)]
    # Lengths differ, so that not all requests fill their chunks in the same step, and none in the last one of a turn.
    lengths = [sizes.prompt + (2 * index + 1) * CHUNK_TOKENS // (2 * size) for index in range(size)]
    return [numbers.choices(range(rig.model.vocabulary), k=length) for length in lengths]


def _summarise(row: SavingRow, passes: Sequence[float], off: SavingRow) -> None:
    row.seconds, row.p99_s = statistics.median(row.times), float(np.percentile(passes, 99))
    ratios = [mine / other for mine, other in zip(row.times, off.times, strict=True)]
    row.ratio, row.ratio_low, row.ratio_high = median_with_interval(ratios)


@contextmanager
def _sessions(
    rig: Rig,
    savers: dict[str, Saver | None],
    prompts: list[list[int]],
    steps: int,
    rows: dict[str, SavingRow],
) -> Iterator[dict[str, Session]]:
    """The same requests for every variant; what was saved of them goes into ``rows``."""
    sessions = {name: Session(rig, saver, prompts, steps) for name, saver in savers.items()}
    yield sessions
    for name, session in sessions.items():
        session.end()
        rows[name].tokens = sum(map(len, session.tokens))
        saver = savers[name]
        if saver is not None:
            rows[name].writes, rows[name].write_bytes = saver.counts()
            rows[name].digest = rows[name].digest or saver.digest("0", session.tokens[0])


class Session:
    """Requests that a variant saves: a pass over their prompts, then decode passes.

    Args:
        saver: None: nothing is saved.
        steps: most decode passes.
    """

    def __init__(self, rig: Rig, saver: Saver | None, prompts: list[list[int]], steps: int) -> None:
        self._rig = rig
        self._saver = saver
        self._prompts = prompts
        self._rids = [str(index) for index in range(len(prompts))]
        self._requests = prepare_synthetic_inputs_for_latency_test(len(prompts), len(prompts[0]), prompts)
        self.tokens = [array("q", prompt) for prompt in prompts]
        """Of each request, as far as they were computed."""
        if saver is not None:
            saver.begin(self._rids, max(map(len, prompts)) + steps)

    def prefill(self) -> float:
        """Seconds of the prompts' pass."""
        starts = np.cumsum([0, *map(len, self._prompts)]).tolist()
        rows = [
            RequestRows(rid, 0, start, len(prompt))
            for rid, start, prompt in zip(self._rids, starts[:-1], self._prompts, strict=True)
        ]
        new = array("q", itertools.chain.from_iterable(self._prompts))
        with self._watched():
            result, seconds = self._timed(rows, new, partial(extend, self._requests, self._rig.runner))
        self._next_ids, _, self._batch = result
        return seconds

    def prefill_each(self) -> float:
        """Seconds of a pass for each prompt, one right behind the other, until all of them are saved."""
        began = time.monotonic()
        with self._watched():
            for rid, request, prompt in zip(self._rids, self._requests, self._prompts, strict=True):
                run = partial(extend, [request], self._rig.runner)
                self._timed([RequestRows(rid, 0, 0, len(prompt))], array("q", prompt), run)
        self.settle()
        return time.monotonic() - began

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next passes."""
        with self._watched():
            return [self._decode_one() for _ in range(steps)]

    def settle(self) -> float:
        """Wait until nothing is being saved; seconds."""
        began = time.monotonic()
        if self._saver is not None:
            self._saver.settle()
        return time.monotonic() - began

    def end(self) -> None:
        """The requests are over and saved."""
        if self._saver is not None:
            self._saver.end()
        runner = self._rig.runner
        for request, known in zip(self._requests, self.tokens, strict=True):
            slots = runner.req_to_token_pool.req_to_token[request.req_pool_idx, : len(known)]
            runner.token_to_kv_pool_allocator.free(slots.to(torch.int64))
            runner.req_to_token_pool.free(request)

    def _decode_one(self) -> float:
        new = array("q", self._next_ids.tolist())
        rows = [RequestRows(rid, len(self.tokens[row]), row, 1) for row, rid in enumerate(self._rids)]
        for row, token in enumerate(new):
            self.tokens[row].append(token)
        run = partial(decode, self._next_ids, self._batch, self._rig.runner)
        (self._next_ids, _), seconds = self._timed(rows, new, run)
        return seconds

    def _timed(self, rows: list[RequestRows], new: array[int], run: Callable[[], Any]) -> tuple[Any, float]:
        """One pass over the tokens ``new``, with what saving does before and after it."""
        began = time.monotonic()
        if self._saver is not None:
            self._saver.begin_pass(rows, new)
        with torch.inference_mode():
            result = run()
        if self._saver is not None:
            self._saver.end_pass()
        return result, time.monotonic() - began

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The saver sees its own passes only."""
        saver = self._saver
        handles = [] if saver is None else self._rig.model.watch(range(self._rig.num_layers), saver.layer)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
