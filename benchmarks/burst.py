"""Histories that all return at the same moment, as after clients restart: TTFT of each method, burst by burst.

Each history is saved once and evicted from the KV pool. Then all are sent at the same time, each followed by a few new
tokens that differ in every round. Methods take turns in each round, one server at a time, and all must give the same
answers. With fewer `--device-contexts` than prompts, the others wait for room in the KV pool.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import Progress

from common.command import ENDED_EARLY, carry_out, errors_told, new_app
from common.gathered import Gathered
from common.header import make_header
from common.model import BenchModel, prepare_model
from common.options import (
    AsJson,
    Folder,
    Logs,
    ModelPath,
    Out,
    Quick,
    Seed,
    check_positive,
    parse_whole_numbers,
    prepare_out,
)
from common.precision import tame
from common.terminal import new_progress, while_doing
from common.turns import in_turn
from serving import burst_report
from serving.comparison import Comparison, Measured
from serving.options import CAPACITY_HELP, Capacity, Methods, parse_capacity, settings_as_json
from serving.servers import ServerSizes, parse_methods, reasons_unavailable, running_servers, sizes_for
from serving.token_client import TokenClient, ask_servers
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose."""

    prompts: tuple[int, ...]
    """Sent at once."""
    history: int
    """Tokens of each that return."""
    new_tokens: int
    """Behind a history, each time others."""
    answer_tokens: int
    rounds: int
    methods: tuple[str, ...]
    model_path: Path | None
    device_contexts: float
    host_size: Capacity
    disk_size: Capacity
    seed: int
    quick: bool

    @property
    def tokens(self) -> int:
        """Of a prompt and its answer."""
        return self.history + self.new_tokens + self.answer_tokens

    @property
    def tiny(self) -> TinyModel:
        """The model where none is given."""
        layers, hidden = (6, 384) if self.quick else (8, 512)
        return TinyModel(
            layers=layers,
            hidden=hidden,
            heads=hidden // 64,
            max_position=self.tokens + 64,
            initializer_range=tame(hidden),
        )


class Bursts:
    """Sends them.

    Args:
        comparison: gets what is measured of a number of prompts after each burst.
    """

    def __init__(
        self, settings: Settings, model: BenchModel, comparison: Comparison, progress: Progress
    ) -> None:
        self._settings = settings
        self._prompt = partial(model.random_prompt, np.random.default_rng(settings.seed))
        self._comparison = comparison
        self._progress = progress
        self._turns = itertools.count()

    async def run(self, clients: dict[str, TokenClient]) -> None:
        """All numbers of prompts."""
        history = self._prompt(self._settings.history)
        for client in clients.values():  # first-use costs, of restores as well
            for _ in range(2):
                await client.ask([*history, *self._prompt(self._settings.new_tokens)], max_tokens=2)
                await client.empty(tiers=False)
        for count in self._settings.prompts if clients else ():
            await self._measure(count, clients)

    async def _measure(self, count: int, clients: dict[str, TokenClient]) -> None:
        settings = self._settings
        task = self._progress.add_task(
            f"{count} prompts at once", total=len(clients) * (1 + settings.rounds) * count
        )
        histories = [self._prompt(settings.history) for _ in range(count)]
        for method, client in clients.items():
            await client.empty(tiers=method != "recompute")
            for history in histories:
                await client.ask(history, max_tokens=1)
                await client.settle()
                self._progress.advance(task)
        rounds: list[dict[str, Measured]] = []
        for _ in range(settings.rounds):
            prompts = [[*history, *self._prompt(settings.new_tokens)] for history in histories]
            rounds.append({})
            for method in in_turn(clients, next(self._turns)):
                client = clients[method]
                await client.empty(tiers=False)
                rounds[-1][method] = await self._send(client, prompts, max_tokens=settings.answer_tokens)
                self._progress.advance(task, count)
                self._comparison.add(count, rounds)
        self._progress.remove_task(task)

    @staticmethod
    async def _send(client: TokenClient, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Measured:
        """All at once; over when the tier has saved what it has to."""
        began = time.monotonic()
        answers = await asyncio.gather(*(client.ask(prompt, max_tokens=max_tokens) for prompt in prompts))
        took_s = time.monotonic() - began
        await client.settle()
        return Measured(list(answers), took_s)


def size_servers(settings: Settings, model: BenchModel) -> ServerSizes:
    """Caches in prompts with their answers.

    Raises:
        ConfigError: the model takes no such prompts.
    """
    if settings.tokens > model.max_position:
        raise ConfigError(
            f"--history: {settings.history} is not allowed; with what follows a prompt has {settings.tokens} tokens, "
            f"the model takes {model.max_position}"
        )
    context = (settings.tokens // CHUNK_TOKENS + 2) * CHUNK_TOKENS  # whole pages, and one for the next token
    return sizes_for(
        device_contexts=settings.device_contexts,
        mean_context=context,
        longest_context=settings.tokens,
        requests_at_once=True,
        host_bytes=settings.host_size.bytes_for(context * model.kv_token_bytes),
        disk_bytes=settings.disk_size.bytes_for(context * model.kv_token_bytes),
        kv_token_bytes=model.kv_token_bytes,
        quick=settings.quick,
    )


def run(settings: Settings, logs: Path | None, folder: Path, found: Gathered) -> None:
    """Measure everything.

    Raises:
        ConfigError, ServerProcessError, ChatError: what went wrong.
    """
    methods = settings.methods
    notes = reasons_unavailable(methods)
    with new_progress() as progress:
        with while_doing(progress, "writing a model"):
            model = prepare_model(folder, settings.model_path, settings.tiny)
        sizes = size_servers(settings, model)
        found.header = {
            **make_header("burst"),
            "model": model.header,
            "settings": settings_as_json(settings),
            "sizes": sizes.as_json(),
        }
        comparison = Comparison(found, "at_once", settings.prompts, methods, notes, settings.rounds)
        comparison.begin()
        bursts = Bursts(settings, model, comparison, progress)
        with running_servers(methods, folder, model.path, sizes, progress, logs) as servers:
            ask_servers(servers, bursts.run)


app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("burst")
def main(
    prompts: Annotated[
        str | None, typer.Option(help="Prompts sent at the same time. Default: 20,80, quick 12.")
    ] = None,
    methods: Methods = "recompute,kv,auto",
    out: Out = None,
    quick: Quick = False,
    model_path: ModelPath = None,
    history: Annotated[
        int | None, typer.Option(help="Tokens of each history. Default: 512, quick 256.", min=64)
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="New tokens after a history.", min=1)] = 32,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer. Default: 8, quick 2.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Bursts of each method. Default: 5, quick 2.", min=1)
    ] = None,
    device_contexts: Annotated[
        float | None,
        typer.Option(
            help="Prompts with their answers that the KV pool holds. Default: as many as are sent together."
        ),
    ] = None,
    host_size: Annotated[
        str | None,
        typer.Option(
            help=f"Chunks in host memory. {CAPACITY_HELP} Default: 1.25 times what is sent together."
        ),
    ] = None,
    disk_size: Annotated[
        str | None, typer.Option(help="Disk tier, in the same units. Default: twice what is sent together.")
    ] = None,
    folder: Folder = None,
    logs: Logs = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    check_positive(device_contexts=device_contexts)
    counts = parse_whole_numbers("--prompts", prompts or ("12" if quick else "20,80"), low=1)
    settings = Settings(
        prompts=counts,
        history=history or (256 if quick else 512),
        new_tokens=new_tokens,
        answer_tokens=answer_tokens or (2 if quick else 8),
        rounds=rounds or (2 if quick else 5),
        methods=parse_methods(methods),
        model_path=model_path,
        device_contexts=device_contexts or max(counts),
        host_size=parse_capacity("--host-size", host_size or str(1.25 * max(counts))),
        disk_size=parse_capacity("--disk-size", disk_size or str(2 * max(counts))),
        seed=seed,
        quick=quick,
    )
    prepare_out(out)
    carry_out(
        "burst",
        partial(run, settings, logs and logs.absolute()),
        burst_report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
