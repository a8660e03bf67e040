"""A server with the tier's defaults: it measures at start, chooses what to store, restores what is predicted to pay.

Histories return while other prompts are computed, so restores begin behind forward passes. On a CPU it runs as well.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.model import BenchModel, load_arguments, prepare_model
from gpu.model_folder import write_model
from gpu.results import Report
from gpu.shapes import Shape, shape_named
from serving.latency import Latency
from serving.servers import device_arguments
from serving.token_client import TokenAnswer, TokenClient, ask_servers
from sglang_hcache.cli.server.process import ServerProcess
from sglang_hcache.cli.tiny_model.model import TinyModel

_STARTUP_TIMEOUT_S = 300.0
_ANSWER_TOKENS = 8
_MOMENT_S = 0.05
"""In which a prompt comes to the device."""
_ENDS = ("done", "declined_slower", "late", "try_late", "failed", "errors", "no_slots")
"""Of ``restore.*``, the counters of how restores ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    lengths: Sequence[int]
    """Tokens of the histories."""
    prompt: int
    """Tokens of the prompt that is computed while a history returns. They are saved as well."""
    host_size: str


ON_GPU = Sizes(lengths=(1024, 2048, 3072, 4096) * 3, prompt=8192, host_size="64GB")


def measure(report: Report, logs: Path, shape: Shape | None = None, sizes: Sizes = ON_GPU) -> None:
    """Counters of restores, predictions beside what was taken, and the time to the first token.

    Args:
        logs: folder for the server's log, whose first lines say what was predicted.
        shape: of the model, whose weights are dummies. Default: Llama-2-7B.
    """
    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as name:
        folder = Path(name)
        write_model(folder, shape or shape_named("llama-2-7b"))
        model = prepare_model(folder, folder, TinyModel())
        pool = sum(sizes.lengths) + 4 * sizes.prompt
        server = ServerProcess(
            [
                *(
                    "--model-path",
                    str(folder),
                    "--dtype",
                    "bfloat16",
                    *load_arguments(folder),
                    *device_arguments(),
                ),
                *("--max-total-tokens", str(pool), "--incremental-streaming-output"),
                *("--hierarchical-cache", "hcache", "--hcache-host-size", sizes.host_size),
            ],
            log=logs / "defaults.log",
            startup_timeout_s=_STARTUP_TIMEOUT_S,
        )
        with server:
            ask_servers({"tier": server}, lambda clients: _ask(clients["tier"], model, sizes, report))


async def _ask(client: TokenClient, model: BenchModel, sizes: Sizes, report: Report) -> None:
    random = np.random.default_rng(0)
    histories = [model.random_prompt(random, length) for length in sizes.lengths]
    computed = []
    for history in histories:
        computed.append(await client.ask(history, max_tokens=_ANSWER_TOKENS))
        await client.settle()
    report("computed", {"ok": True, **_times(computed)})
    report("they return to an idle server", await _return(client, histories))
    prompts = [model.random_prompt(random, sizes.prompt) for _ in histories]
    report("they return beside prefills", await _return(client, histories, prompts))


async def _return(
    client: TokenClient, histories: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """One history after the other, each a moment after a prompt. None may be late: passes before it are no time of a
    restore.
    """
    await client.empty(tiers=False)
    before = await _counters(client)
    answers = []
    for history, prompt in itertools.zip_longest(histories, prompts):
        beside = (
            None if prompt is None else asyncio.create_task(client.ask(prompt, max_tokens=_ANSWER_TOKENS))
        )
        await asyncio.sleep(_MOMENT_S)
        answers.append(await client.ask(history, max_tokens=_ANSWER_TOKENS))
        if beside is not None:
            await beside
    found = {name: value - before[name] for name, value in (await _counters(client)).items()}
    is_right = found["done"] > 0 and not (found["late"] or found["failed"] or found["errors"])
    return {"ok": is_right, **found, **_times(answers)}


async def _counters(client: TokenClient) -> dict[str, float]:
    """How restores ended; and of those from host memory, the sum of what they took over what was predicted."""
    state = await client.tier_state()
    assert state is not None
    ends = {name: state["counters"].get(f"restore.{name}", 0) for name in _ENDS}
    ratio = state["measures"].get("restore.prediction_ratio_host", {"sum": 0.0})
    return {**ends, "sum_of_prediction_ratios": ratio["sum"]}


def _times(answers: Sequence[TokenAnswer]) -> dict[str, Any]:
    return {
        "restored_tokens": sum(answer.sources.restored for answer in answers),
        **Latency.of([answer.ttft_s for answer in answers]).fields("ttft"),
    }
