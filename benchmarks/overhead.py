"""What the tier costs requests that it does not help, and gives those that it does: a server with it, one without.

Both run at the same time, idle in turns. What is compared alternates, and each number is a median of its rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
import yaml
from rich.console import Console
from rich.progress import Progress

from common.header import make_header
from common.model import BenchModel, prepare_model
from common.options import AsJson, Folder, ModelPath, Out, Quick, Seed, prepare_out
from serving import overhead_report
from serving.token_client import TokenAnswer, TokenClient
from sglang_hcache.cli.replay import FAIR_ENVIRONMENT, launch_together
from sglang_hcache.cli.server_process import ServerProcess
from sglang_hcache.cli.tiny_model import TinyModel
from sglang_hcache.core.errors import ConfigError, HCacheError
from sglang_hcache.core.units import SIZE_HELP, parse_size

TIER, OFF = "tier", "off"
_DECODED = 48
"""Tokens of each answer in a batch whose TBT is compared."""
_COMPANY = 4
"""Requests that decode while a restore runs."""
_WARM_UP = 3
_STARTUP_TIMEOUT_S = 400.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    prompt: int
    """Tokens of prompts that nobody asked before."""
    histories: tuple[int, ...]
    """Tokens of prompts that come back."""
    long_history: int
    """Tokens of the one that comes back while others decode."""
    batch: int
    rounds: int
    starts: int
    host_bytes: int
    seed: int

    @property
    def pool_tokens(self) -> int:
        return 2 * max(*self.histories, self.long_history, self.prompt) + 2048


@app.command()
def main(
    model_path: ModelPath = None,
    layers: Annotated[int, typer.Option(help="Layers of the random model.", min=1)] = 24,
    hidden: Annotated[int, typer.Option(help="Its hidden size.", min=64)] = 512,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    prompt: Annotated[int, typer.Option(help="Tokens of fresh prompts.", min=64)] = 2048,
    histories: Annotated[str, typer.Option(help="Tokens of histories that return.")] = "1024,4096,16384",
    long_history: Annotated[
        int, typer.Option(help="Tokens of the history that returns while others decode.", min=64)
    ] = 16384,
    batch: Annotated[int, typer.Option(help="Requests that decode together.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Times that each thing is measured.", min=1)] = 7,
    starts: Annotated[int, typer.Option(help="Starts of each server, alone.", min=0)] = 3,
    host_size: Annotated[str, typer.Option(help=f"--hcache-host-size. {SIZE_HELP}")] = "2GB",
    folder: Folder = None,
    out: Out = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare a server with the tier and one without: capture, decoding, start, memory, and time to the first token."""
    prepare_out(out)
    try:
        lengths = tuple(int(part) for part in histories.split(","))
        host_bytes = parse_size(host_size)
    except ValueError as error:
        raise ConfigError(f"--histories, --host-size: {error}") from None
    settings = Settings(prompt, lengths, long_history, batch, rounds, starts, host_bytes, seed)
    tiny = TinyModel(layers=layers, hidden=hidden, heads=hidden // 64, dtype=dtype, max_position=40_000)
    if quick:
        settings = Settings(512, (1024,), 2048, 4, 3, 1, 256 * 10**6, seed)
        tiny = TinyModel(layers=6, hidden=256, heads=4, dtype=dtype, max_position=40_000)
    console = Console(stderr=True, quiet=as_json)
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix="overhead-") as scratch:
        model = prepare_model(Path(scratch), model_path, tiny)
        data = make_header("overhead") | {"model": {**model.header, "dtype": dtype}}
        data |= asyncio.run(measure(settings, model, dtype, Path(scratch), console))
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        overhead_report.show(Console(), data)
    if out is not None:
        overhead_report.write(out, data)


async def measure(
    settings: Settings, model: BenchModel, dtype: str, folder: Path, console: Console
) -> dict[str, Any]:
    """Everything, as rows: ``what``, ``off``, ``tier`` (medians) and ``ratio`` of each round's pairs."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("starting servers", total=None)
        started = _startups(settings, model, dtype, folder)
        with _running(settings, model, dtype, folder) as servers:
            async with TokenClient(servers[OFF].url) as off, TokenClient(servers[TIER].url) as tier:
                bench = Bench(settings, model, {OFF: off, TIER: tier})
                rows = [*started]
                for name, run in bench.sections():
                    progress.update(task, description=name)
                    rows += await run()
                progress.update(task, description="memory")
                rows += await _memory(settings, servers, tier)
    return {"settings": {**settings.__dict__}, "rows": rows}


class Bench:
    """Requests to both servers, in turns.

    Args:
        clients: ``TIER`` and ``OFF``.
    """

    def __init__(self, settings: Settings, model: BenchModel, clients: dict[str, TokenClient]) -> None:
        self._settings = settings
        self._clients = clients
        self._tokens = model.ordinary_tokens()
        self._random = np.random.default_rng(settings.seed)

    def sections(self) -> Iterator[tuple[str, Callable[[], Awaitable[list[dict[str, Any]]]]]]:
        """What is measured, in order."""
        yield "prefill", self._prefill
        yield "decoding", self._decode
        for length in self._settings.histories:
            yield f"{length} tokens return", lambda length=length: self._returning(length)
        yield "decoding while others return", self._company

    def _prompt(self, length: int) -> list[int]:
        return self._random.choice(self._tokens, size=length).tolist()  # type: ignore[no-any-return]

    async def _alternate(
        self, once: Callable[[TokenClient, int], Awaitable[float]]
    ) -> dict[str, list[float]]:
        """``once(client, round)`` for both servers in each round; which one comes first alternates."""
        times: dict[str, list[float]] = {OFF: [], TIER: []}
        for number in range(-_WARM_UP, self._settings.rounds):
            for name in (OFF, TIER) if number % 2 else (TIER, OFF):
                seconds = await once(self._clients[name], number)
                await self._clients[TIER].settle()
                if number >= 0:
                    times[name].append(seconds)
        return times

    async def _prefill(self) -> list[dict[str, Any]]:
        prompts = {n: self._prompt(self._settings.prompt) for n in range(-_WARM_UP, self._settings.rounds)}

        async def once(client: TokenClient, number: int) -> float:
            return (await client.ask(prompts[number], max_tokens=1)).ttft_s

        return [_row(f"prefill of {self._settings.prompt} tokens", await self._alternate(once))]

    async def _decode(self) -> list[dict[str, Any]]:
        async def once(client: TokenClient, _: int) -> float:
            asks = [client.ask(self._prompt(128), max_tokens=_DECODED) for _ in range(self._settings.batch)]
            answers = await asyncio.gather(*asks)
            # The last half: all requests decode then, and none is prefilled.
            return statistics.median(gap for answer in answers for gap in answer.gaps_s[_DECODED // 2 :])

        return [_row(f"decoding, {self._settings.batch} requests: TBT", await self._alternate(once))]

    async def _returning(self, length: int) -> list[dict[str, Any]]:
        history = self._prompt(length)
        restored = []

        async def once(client: TokenClient, _: int) -> float:
            await client.ask(history, max_tokens=1)
            await client.empty(tiers=False)
            answer = await client.ask([*history, *self._prompt(64)], max_tokens=1)
            if client is self._clients[TIER]:
                restored.append(answer.sources.restored)
            return answer.ttft_s

        row = _row(f"{length} tokens return, 64 are new: TTFT", await self._alternate(once))
        return [row | {"restored_tokens": statistics.median(restored)}]

    async def _company(self) -> list[dict[str, Any]]:
        """TBT of others: alone, and between a returning request's arrival and its first token."""
        history = self._prompt(self._settings.long_history)
        gaps: dict[str, dict[str, list[float]]] = {
            name: {"alone": [], "beside": []} for name in self._clients
        }
        for _ in range(self._settings.rounds):
            for name, client in self._clients.items():
                await client.ask(history, max_tokens=1)
                await client.empty(tiers=False)
                alone, beside = await self._decode_beside(client, history)
                gaps[name]["alone"] += alone
                gaps[name]["beside"] += beside
                await self._clients[TIER].settle()
        rows = []
        for statistic, percent in (("p50", 50), ("p99", 99)):
            found = {
                name: {
                    when: float(np.percentile(times, percent)) for when, times in of_server.items() if times
                }
                for name, of_server in gaps.items()
            }
            rows.append(
                {
                    "what": f"TBT {statistic} while {self._settings.long_history} tokens return, over TBT alone",
                    "unit": "x",
                    **{name: value["beside"] / value["alone"] for name, value in found.items()},
                    "seconds": found,
                }
            )
        return rows

    async def _decode_beside(
        self, client: TokenClient, history: list[int]
    ) -> tuple[list[float], list[float]]:
        """Gaps between tokens of a few requests: alone, and those that ``history`` came into."""

        async def batch() -> list[TokenAnswer]:
            asks = [client.ask(self._prompt(128), max_tokens=4 * _DECODED) for _ in range(_COMPANY)]
            return list(await asyncio.gather(*asks))

        began = time.perf_counter()
        alone = [gap for answer in await batch() for gap in answer.gaps_s[_DECODED:]]
        took = time.perf_counter() - began
        began = time.perf_counter()
        stream = asyncio.create_task(batch())
        await asyncio.sleep(0.3 * took)  # all of them decode by now
        asked = time.perf_counter()
        first_token = asked + (await client.ask(history, max_tokens=1)).ttft_s
        beside = []
        for answer in await stream:
            at = began + answer.ttft_s
            for gap in answer.gaps_s:
                at += gap
                if at > asked and at - gap < first_token:
                    beside.append(gap)
        return alone, beside


def _row(what: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median of each round's ratio with its spread."""
    ratios = [tier / off for off, tier in zip(times[OFF], times[TIER], strict=True)]
    return {
        "what": what,
        "unit": "s",
        **{name: statistics.median(seconds) for name, seconds in times.items()},
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        "times": times,
    }


# -- servers -------------------------------------------------------------------------------------------


def _server(name: str, settings: Settings, model: BenchModel, dtype: str, folder: Path) -> ServerProcess:
    args = [
        *("--model-path", str(model.path), "--dtype", dtype, "--incremental-streaming-output"),
        *("--max-total-tokens", str(settings.pool_tokens), "--sleep-on-idle"),
    ]
    if name == OFF:
        args += ["--hierarchical-cache", "off", "--hcache-cpu-fixes"]
    else:
        config = folder / "hcache.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "dirs": [str(folder / "disk")],
                    "disk_size": "16GB",
                    "disk_free_floor": "256MiB",
                    "host_size": settings.host_bytes,
                }
            )
        )
        args += ["--hcache-config", str(config)]
    return ServerProcess(
        args, log=folder / f"{name}.log", extra_env=FAIR_ENVIRONMENT, startup_timeout_s=_STARTUP_TIMEOUT_S
    )


@contextmanager
def _running(
    settings: Settings, model: BenchModel, dtype: str, folder: Path
) -> Iterator[dict[str, ServerProcess]]:
    servers = {name: _server(name, settings, model, dtype, folder) for name in (OFF, TIER)}
    try:
        for server in servers.values():  # one after the other: the tier measures this machine when it starts
            launch_together([server])
        yield servers
    finally:
        for server in servers.values():
            server.kill()


def _startups(settings: Settings, model: BenchModel, dtype: str, folder: Path) -> list[dict[str, Any]]:
    """Seconds from launching to serving, each server alone."""
    times: dict[str, list[float]] = {OFF: [], TIER: []}
    for _ in range(settings.starts):
        for name, seconds in times.items():
            server = _server(name, settings, model, dtype, folder)
            began = time.monotonic()
            try:
                launch_together([server])
                seconds.append(time.monotonic() - began)
            finally:
                server.kill()
    if not settings.starts:
        return []
    row = _row("start", times)
    return [row, {"what": "start: added", "unit": "s", OFF: 0.0, TIER: row[TIER] - row[OFF]}]


async def _memory(
    settings: Settings, servers: dict[str, ServerProcess], tier: TokenClient
) -> list[dict[str, Any]]:
    """Bytes that belong to each server alone, after the same requests; the host tier counts as far as it is filled."""
    state = await tier.tier_state()
    assert state is not None
    host = state["host"]
    filled = settings.host_bytes - host["free"] * host["chunk_bytes"]
    used = {name: float(_unique_bytes(server.pid)) for name, server in servers.items()}
    return [
        {"what": "memory", "unit": "bytes", **used},
        {
            "what": "memory beyond --hcache-host-size",
            "unit": "bytes",
            OFF: 0.0,
            TIER: used[TIER] - used[OFF] - filled,
        },
    ]


def _unique_bytes(pid: int) -> int:
    main_process = psutil.Process(pid)
    return sum(
        process.memory_full_info().uss for process in (main_process, *main_process.children(recursive=True))
    )


if __name__ == "__main__":
    try:
        app()
    except HCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
