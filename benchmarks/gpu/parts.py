"""What ``run.py`` runs, each part in a process of its own: one that fails, hangs or dies stops no other."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpu import results
from gpu.results import Report
from gpu.shapes import SHAPES, shape_named

NOT_SHOWN = {
    "attention by fa3": "all servers that are compared use Triton's",
    "LMCache": "no part starts it",
    "how fast a disk is, GPUDirect Storage": "the part `disk` only shows that data read from a disk is right",
}
"""What a GPU should show, and no part does -> why."""


_ONE_MODEL = "llama-2-13b"
"""Of those that SGLang runs with dummy weights, in the time that there is."""


_PATIENCE_S = 60.0
"""For a part that is told to end: it ends its servers and removes their folders."""
_LAST_SHARE = 1 / 10
"""Of a part's time: when it is told to end, so that it says what it has by then."""


@dataclass(frozen=True)
class Part:
    name: str
    budget_s: float
    what: str
    is_extra: bool = False
    """Runs with ``--all`` or when it is asked for: the others together take under nine minutes."""


PARTS = (
    Part(
        "kernel",
        20,
        "the Triton kernel: every shape, mutants, odd token counts, a pool of 2**31 values; its speed",
    ),
    Part("restores", 55, "engine, streams and pinned memory on random layers of every shape; efficiency"),
    Part(
        "saving",
        15,
        "saved rows of prefills and replayed CUDA graphs, compared with the originals; time added to a pass",
    ),
    Part(
        "server",
        105,
        "a server, CUDA graphs on: equality, decoded tokens, 200 concurrent requests, eviction, strict memory checks",
    ),
    Part(
        "defaults",
        75,
        "Llama-2-7B with the tier's defaults: predictions and restores, also behind prefills",
        is_extra=True,
    ),
    Part("flashinfer", 105, "the same server, with FlashInfer's attention", is_extra=True),
    Part(
        "disk",
        150,
        "a server with hidden states on disk, and the next one on the same directory",
        is_extra=True,
    ),
    Part(
        "overhead",
        120,
        "Llama-2-13B with the tier and without: prefill, time between tokens, also during restores, TTFT",
    ),
    Part("zipf", 150, "questions about documents under Zipf skew 0, 1 and 2: recompute, kv, hidden, HiCache"),
    *(
        Part(
            f"model {shape.name}",
            65,
            "SGLang's model with dummy weights: self-check, its mutants, restores, prefill",
            is_extra=shape.name != _ONE_MODEL,
        )
        for shape in SHAPES
    ),
)


def run_here(name: str, report: Report, logs: Path) -> None:
    """Carry out a part in this process; its servers' logs are in ``logs``."""
    measure_of(name, logs)(report)


def measure_of(name: str, logs: Path) -> Callable[[Report], None]:
    # Imported where they are used: the list of parts is for machines without a GPU as well.
    kind, _, shape = name.partition(" ")
    if name == "kernel":
        from gpu import kernel

        return kernel.measure
    if name == "saving":
        from gpu import saving

        return saving.measure
    if name == "restores":
        from gpu import restores

        return restores.measure
    if kind == "model":
        from gpu import models

        return functools.partial(models.measure, shape_named(shape))
    if name == "defaults":
        from gpu import defaults

        return functools.partial(defaults.measure, logs=logs)
    from gpu import serving

    measure = {
        "server": serving.measure_server,
        "flashinfer": serving.measure_flashinfer,
        "disk": serving.measure_disk,
        "overhead": serving.measure_overhead,
        "zipf": serving.measure_zipf,
    }[name]
    return functools.partial(measure, logs=logs)


def run_apart(
    part: Part, command: Sequence[str], log: Path, output: Path, on_result: Report
) -> dict[str, Any]:
    """Run ``command``, which prints results as lines ``RESULT {...}``, within the part's budget.

    Args:
        log: receives its standard error.
        output: receives its standard output.
        on_result: gets each result as soon as it is there.

    Returns:
        The part's outcome: ``status`` is passed, failed (its results say so), error or timeout.

    Raises:
        KeyboardInterrupt: the run is ended; so is the part then.
    """
    began = time.monotonic()
    told = _Told(output, on_result)
    with log.open("wb") as errors, told.output.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        status = None
        try:
            told_to_end = False
            while status is None and (used := time.monotonic() - began) <= part.budget_s:
                if not told_to_end and used > (1 - _LAST_SHARE) * part.budget_s:
                    process.terminate()
                    told_to_end = True
                status = process.poll()
                told.pass_on()
                time.sleep(0.05)
        except KeyboardInterrupt:  # told to end: so is the part, and what it says then counts as well
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            told.pass_on()
            raise
        finally:
            _end(process)
    outcome = {"seconds": time.monotonic() - began, "results": told.count}
    told.pass_on()
    if status is None or (told_to_end and status != 0):
        return {"status": "timeout", "why": f"took longer than {part.budget_s:g} s", **outcome}
    if status != 0:
        return {"status": "error", "why": _last_line(log) or f"exit status {status}", **outcome}
    return {"status": "passed" if told.all_ok and told.count else "failed", **outcome}


class _Told:
    """What a part writes to ``output``."""

    def __init__(self, output: Path, on_result: Report) -> None:
        self.output = output
        self._on_result = on_result
        self.count = 0
        self.all_ok = True

    def pass_on(self) -> None:
        """The results that are new."""
        for name, found in results.read(self.output)[self.count :]:
            self._on_result(name, found)
            self.all_ok = self.all_ok and bool(found.get("ok", True)) and not found.get("mutants_taken")
            self.count += 1


def part_command(name: str, logs: Path) -> list[str]:
    """Of a process that carries out a part, whose servers' logs are in ``logs``."""
    return [sys.executable, str(Path(__file__).parent / "run.py"), "--part", name, "--logs", str(logs)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the part and all that it started: servers have sessions of their own."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
