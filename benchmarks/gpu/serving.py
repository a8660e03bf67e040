"""Real servers: what they answer when much is evicted and restored at a time, and what that costs and brings.

On a CPU all of it runs as well, with smaller sizes: so the tests do.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from common.model import BenchModel, prepare_model
from common.precision import precision, tame
from gpu.model_folder import write_model
from gpu.results import Report
from gpu.shapes import Shape, shape_named
from serving.comparison import Measured, row_of
from serving.servers import device_arguments
from serving.token_client import TokenAnswer, TokenClient, ask_servers
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.server.process import ServerProcess
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.testing.zipf import zipf_order

T = TypeVar("T")
Computed = tuple[list[list[int]], list[TokenAnswer]]
"""Histories, and what a server that computed them answered."""

_STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_INIT_NEW_TOKEN_RATIO": "1",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1",
}
"""SGLang counts its slots all the time, and ends where one is lost or used twice. It keeps room for whole answers: with
overlap scheduling it loses logprobs of a request that it retracts."""
_STARTUP_TIMEOUT_S = 300.0
_SHORT_PROMPTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a server under load. Heads of 64 values."""

    layers: int
    hidden: int
    histories: int
    length: int
    """Tokens of each history."""
    pool_histories: int
    """That the KV pool holds: fewer than there are, so that they evict each other."""
    requests: int
    """At once."""
    answer: int
    """Tokens of each of them."""
    decoded: int
    """Tokens of one long answer, which comes back as part of a prompt."""

    @property
    def stored_tokens(self) -> int:
        """Of all histories and what answers add to them."""
        return self.histories * (self.length + self.answer + CHUNK_TOKENS)

    @property
    def tiny(self) -> TinyModel:
        return TinyModel(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // 64,
            max_position=2 * (self.length + self.decoded) + 1024,
            initializer_range=tame(self.hidden),
        )


ON_GPU = Sizes(
    layers=12,
    hidden=1024,
    histories=40,
    length=2048,
    pool_histories=20,
    requests=200,
    answer=16,
    decoded=256,
)


def measure_server(
    report: Report, logs: Path | None = None, sizes: Sizes = ON_GPU, more: Sequence[str] = ()
) -> None:
    """One server with hidden states: equality, decoded tokens, and many requests at once under eviction.

    Args:
        logs: folder for the server's log; None: it is removed.
        more: arguments of the server.
    """
    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as name:
        folder = Path(name)
        model = prepare_model(folder, None, sizes.tiny)
        server = _server(model, sizes, logs or folder, 2 * sizes.stored_tokens * model.kv_token_bytes, more)
        with server:
            _ask(server, lambda client: ServerChecks(client, model, sizes).run(report))


def measure_flashinfer(report: Report, logs: Path) -> None:
    """The same with FlashInfer's attention."""
    measure_server(report, logs, more=("--attention-backend", "flashinfer"))


def measure_disk(report: Report, logs: Path | None = None, sizes: Sizes = ON_GPU) -> None:
    """Hidden states on disk, some of them in host memory as well; then the next server on the same directory.

    Args:
        logs: folder for the servers' log; None: it is removed.
    """
    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as name:
        folder = Path(name)
        model = prepare_model(folder, None, sizes.tiny)
        stored = sizes.stored_tokens * model.kv_token_bytes
        disk = ("--hcache-dirs", str(folder / "disk"), "--hcache-disk-size", str(2 * stored))
        # Of hidden states, which are half as large, it holds a part.
        server = _server(model, sizes, logs or folder, stored // 3, disk)
        with server:
            computed = _ask(server, lambda client: ServerChecks(client, model, sizes).from_disk(report))
            server.stop()
            server.start()
            _ask(
                server,
                lambda client: ServerChecks(client, model, sizes).from_disk_again(report, computed),
            )


def _server(
    model: BenchModel, sizes: Sizes, logs: Path, host_bytes: int, more: Sequence[str]
) -> ServerProcess:
    return ServerProcess(
        [
            *("--model-path", str(model.path), "--dtype", precision().dtype, *device_arguments()),
            *("--max-total-tokens", str(sizes.pool_histories * sizes.length + sizes.decoded + 1024)),
            *("--chunked-prefill-size", str(sizes.length), "--incremental-streaming-output"),
            *("--hcache-method", "hidden", "--hcache-restore", "always"),
            *("--hcache-host-size", str(host_bytes), *more),
        ],
        log=logs / "server.log",
        extra_env=_STRICT,
        startup_timeout_s=_STARTUP_TIMEOUT_S,
    )


def _ask(server: ServerProcess, ask: Callable[[TokenClient], Awaitable[T]]) -> T:
    return ask_servers({"tier": server}, lambda clients: ask(clients["tier"]))


class ServerChecks:
    """What one server is asked. All answers are greedy."""

    def __init__(self, client: TokenClient, model: BenchModel, sizes: Sizes) -> None:
        self._client = client
        self._sizes = sizes
        self._prompt = partial(model.random_prompt, np.random.default_rng(0))

    async def run(self, report: Report) -> None:
        """Each check as soon as it is over."""
        report("what was decoded comes back", await self._decoded())
        # Of the lengths for which passes are recorded, where they are: those in between are padded.
        lengths = [CHUNK_TOKENS + 8 + index * self._sizes.length // 80 for index in range(_SHORT_PROMPTS)]
        report("short prompts come back", await self._come_back(*await self._computed(lengths)))
        histories, computed = await self._computed([self._sizes.length] * self._sizes.histories)
        report("restored equals computed", await self._come_back(histories, computed))
        await self._forget_device()
        report(f"{self._sizes.requests} requests at once", await self._crowd(histories, computed))

    async def from_disk(self, report: Report) -> Computed:
        """Histories come back of which host memory has no room for all."""
        histories, computed = await self._computed([self._sizes.length] * self._sizes.histories)
        found = await self._come_back(histories, computed)
        report("from host memory and disk", found | {"ok": found["ok"] and found["disk_hit_ratio"] > 0})
        return histories, computed

    async def from_disk_again(self, report: Report, before: Computed) -> None:
        """All come back from disk to a server that has never seen them."""
        histories, computed = before
        found = self._compared(await self._ask_each(histories), computed)
        report("from disk, after a restart", found | {"ok": found["ok"] and not found["device_hit_ratio"]})

    async def _computed(self, lengths: Sequence[int]) -> Computed:
        prompts = [self._prompt(length) for length in lengths]
        computed = []
        for prompt in prompts:
            computed.append(await self._ask(prompt))
            await self._client.settle()  # else what is saved depends on what else the machine does
        return prompts, computed

    async def _come_back(
        self, prompts: Sequence[Sequence[int]], computed: Sequence[TokenAnswer]
    ) -> dict[str, Any]:
        await self._forget_device()
        return self._compared(await self._ask_each(prompts), computed)

    async def _decoded(self) -> dict[str, Any]:
        """A long answer as the next prompt's history: its states were saved while it was made."""
        prompt = self._prompt(2 * CHUNK_TOKENS)
        answer = await self._client.ask(prompt, max_tokens=self._sizes.decoded)
        longer = [*prompt, *answer.tokens, *self._prompt(8)]
        await self._forget_device()
        restored = await self._ask(longer)
        await self._client.empty(tiers=True)
        found = self._compared([restored], [await self._ask(longer)])
        # The last token of an answer is computed by nobody.
        return found | {"ok": found["ok"] and restored.sources.restored >= len(longer) - 8 - CHUNK_TOKENS}

    async def _crowd(
        self, histories: Sequence[Sequence[int]], computed: Sequence[TokenAnswer]
    ) -> dict[str, Any]:
        """All at once, the popular ones often, with room for half of them on the device."""
        order = zipf_order(len(histories), self._sizes.requests, alpha=0.5, seed=1)
        answers = await asyncio.gather(*(self._ask(histories[item]) for item in order))
        await self._client.settle()
        state = await self._client.tier_state()
        assert state is not None
        found = self._compared(answers, [computed[item] for item in order])
        is_idle = not any(state["requests"].values()) and not state["in_flight_tokens"]
        dropped = {name: count for name, count in state["counters"].items() if "dropped" in name}
        is_whole = not dropped.get("capture.rows_dropped_incomplete")
        is_right = found["unequal"] == 0 and found["restored_tokens"] > 0
        return found | {"ok": is_right and is_idle and is_whole, **dropped}

    def _compared(self, answers: list[TokenAnswer], expected: Sequence[TokenAnswer]) -> dict[str, Any]:
        row = row_of([Measured(answers)], [Measured([*expected])])
        # All but what is always computed: the last token, and what does not fill a chunk.
        least = row["prompt_tokens"] - len(answers) * (CHUNK_TOKENS + 8)
        return {
            "ok": row["unequal"] == 0 and row["restored_tokens"] >= least,
            "different_answers": len({answer.tokens for answer in answers}),
            **row,
        }

    async def _ask_each(self, prompts: Sequence[Sequence[int]]) -> list[TokenAnswer]:
        return [await self._ask(prompt) for prompt in prompts]

    async def _ask(self, prompt: Sequence[int]) -> TokenAnswer:
        return await self._client.ask(prompt, max_tokens=self._sizes.answer)

    async def _forget_device(self) -> None:
        await self._client.empty(tiers=False)


OVERHEAD = (
    *("--prompt", "4096", "--histories", "4096,16384", "--long-history", "16384", "--batches", "1,16"),
    # A history of 16,384 tokens takes more than a second to compute: few rounds, and answers of two chunks.
    *("--decoded", "128", "--rounds", "3", "--warm-up", "1", "--chunks", "10000", "--host-size", "14GB"),
    *("--in-a-row", "0"),  # 27 s, for which there is no time
)


_ROOM_FOR_13B = 100 * 2**30
"""Of device memory, for two servers of Llama-2-13B's sizes."""


def measure_overhead(
    report: Report,
    logs: Path,
    shape: Shape | None = None,
    sizes: Sequence[str] = OVERHEAD,
) -> None:
    """``overhead.py``: a server with the tier, hidden states in host memory, beside one without, in turns.

    Args:
        logs: folder for the servers' logs.
        shape: of the model, whose weights are dummies. Default: Llama-2-13B, or 7B where two of those do not fit.
        sizes: arguments that say how much is measured.
    """
    shape = shape or overhead_shape()

    def on_row(row: dict[str, Any]) -> None:
        found = {name: value for name, value in row.items() if name not in ("what", "times")}
        report(row["what"], {"model": shape.name, **found, "ok": "not_measured" not in row})

    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as name:
        model = Path(name) / "model"
        model.mkdir()
        write_model(model, shape)
        arguments = (
            *("--model-path", str(model), "--dtype", "bfloat16", "--method", "hidden", "--starts", "0"),
            *("--no-disk", "--dir", name, "--logs", str(logs), *sizes),
        )
        run_command("overhead", arguments, on_row)


def overhead_shape() -> Shape:
    """Of a model that two servers have room for."""
    fits = not has_gpu() or torch.cuda.get_device_properties(0).total_memory > _ROOM_FOR_13B
    return shape_named("llama-2-13b" if fits else "llama-2-7b")


ZIPF = (
    *("--layers", "16", "--hidden", "4096", "--documents", "8", "--scale", "1", "--context-limit", "8192"),
    *("--answer-limit", "8", "--requests", "24", "--host-size", "8", "--time-limit", "2"),
)
"""7,000 tokens a document on average, and as much host memory as K and V of all of them take."""


def measure_zipf(report: Report, logs: Path, sizes: Sequence[str] = ZIPF) -> None:
    """``zipf_replay.py``: each method and SGLang's HiCache, with as much host memory, on documents that fit into it.

    Args:
        logs: folder for the servers' logs.
        sizes: arguments that say how much is measured.
    """

    def on_row(row: dict[str, Any]) -> None:
        found = {name: value for name, value in row.items() if name not in ("alpha", "method")}
        report(f"alpha {row['alpha']:g}, {row['method']}", found | {"ok": not row.get("unequal")})

    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as name:
        arguments = (
            *("--alphas", "0,1,2", "--methods", "recompute,kv,hidden,hicache", "--no-disk"),
            *("--dir", name, "--logs", str(logs), *sizes),
        )
        run_command("zipf_replay", arguments, on_row)


def run_command(command: str, arguments: Sequence[str], on_row: Callable[[dict[str, Any]], None]) -> None:
    """Each row of what a command of ``benchmarks/`` finds out, also if this process is told to end meanwhile.

    Raises:
        subprocess.CalledProcessError: it failed; why is in this part's log.
        KeyboardInterrupt: the process is told to end; so is the command then.
    """
    path = Path(__file__).parents[1] / f"{command}.py"
    whole = [sys.executable, str(path), *arguments, "--json"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(whole, stdout=output)
        try:
            status = process.wait()
        finally:
            process.terminate()  # where it runs still, it ends its servers
            process.wait()
            output.seek(0)
            for row in json.loads(output.read() or b"{}").get("rows", ()):
                on_row(row)
    if status != 0:
        raise subprocess.CalledProcessError(status, whole)
