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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.benchmark.one_batch import decode, extend, prepare_synthetic_inputs_for_latency_test

from ablation.savers import DirectSaver, Saver, TwoStageSaver
from restoring.rig import Rig
from sglang_hcache.capture.events import RequestRows
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.observer import Counters

OFF, TWO_STAGE, CACHED, DIRECT = "off", "two-stage", "direct, page cache", "direct"
"""Nothing is saved; as the server does; written directly into the page cache; written directly to the device."""
PASSES = 3
"""Prompts that are computed one after the other where prefill is measured."""


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

    @property
    def loads(self) -> list[tuple[str, int]]:
        """What is measured, and its size."""
        return [("prefill", self.prefill), *(("decode", batch) for batch in self.batches)]


@dataclass
class Session:
    """What one variant took in one round."""

    passes_s: list[float]
    drain_s: float
    tokens: array[int]
    """Of the first request."""
    num_tokens: int


def measure_saving(
    settings: SavingSettings,
    rig: Rig,
    step: Callable[[], None],
    on_rows: Callable[[str, int, Sequence[SavingRow]], None],
) -> None:
    """Prefill and every batch size, each with every variant in turn.

    Args:
        step: called after each round.
        on_rows: gets the rows of each load and size as soon as it is over.
    """
    largest = max(settings.prefill, max(settings.batches) * (settings.prompt + CHUNK_TOKENS))
    with ExitStack() as stack:
        two_stage = TwoStageSaver(rig, settings.folder / "two-stage", largest)
        stack.callback(two_stage.close)
        savers: dict[str, Saver | None] = {OFF: None, TWO_STAGE: two_stage}
        for name, to_device in ((CACHED, False), (DIRECT, True)):
            folder = settings.folder / ("direct" if to_device else "cached")
            direct = savers[name] = DirectSaver(rig, folder, largest, to_device=to_device)
            stack.callback(direct.close)
        for load, size in settings.loads:
            on_rows(load, size, _measure_load(settings, rig, savers, two_stage.observer, (load, size), step))


def _measure_load(
    settings: SavingSettings,
    rig: Rig,
    savers: dict[str, Saver | None],
    observer: Counters,
    load_and_size: tuple[str, int],
    step: Callable[[], None],
) -> list[SavingRow]:
    load, size = load_and_size
    of_load = {name: SavingRow(load, size, name) for name in savers}
    passes: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(-1, settings.rounds):  # the first one warms up
        order = list(savers)[number % len(savers) :] + list(savers)[: number % len(savers)]
        for name in order:
            before = observer["capture.rows_dropped_staging_full"]
            session = _session(rig, savers[name], *_prompts(rig, settings, load, size))
            _note(of_load[name], session, savers[name], is_first=number < 0)
            of_load[name].dropped += observer["capture.rows_dropped_staging_full"] - before
            if number >= 0:
                passes[name] += session.passes_s
        step()
    for name, row in of_load.items():
        _summarise(row, passes[name], of_load[OFF])
    return list(of_load.values())


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
        saver.begin_pass(rows, new)
    result = run()
    if saver is not None:
        saver.end_pass()
    return result, time.monotonic() - began


def _free(runner: Any, requests: Sequence[Any], tokens: Sequence[array[int]]) -> None:
    for request, known in zip(requests, tokens, strict=True):
        slots = runner.req_to_token_pool.req_to_token[request.req_pool_idx, : len(known)]
        runner.token_to_kv_pool_allocator.free(slots.to(torch.int64))
        runner.req_to_token_pool.free(request)
