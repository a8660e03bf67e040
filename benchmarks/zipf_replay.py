"""Questions about documents that outgrow the KV pool, under Zipf skew: each method on its own server.

The HCache paper's Figure 15. Every request goes to the servers of all methods, one after the other in turns, with
nothing else running, and all must give the same answers. A server keeps the most recently used documents in its KV
pool, sized in contexts; evicted ones are restored by its method. Before each round of a skew everything is emptied,
and each document is asked about once (not measured), so that no method pays for a document's first request. Each round
has a different order and different questions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    parse_numbers,
    prepare_out,
)
from common.precision import precision, tame
from common.terminal import new_progress, while_doing
from common.turns import in_turn
from serving import zipf_report
from serving.comparison import Comparison, Measured
from serving.options import (
    Capacity,
    DeviceContexts,
    Disk,
    DiskSize,
    HostSize,
    Methods,
    Rounds,
    parse_capacity,
    settings_as_json,
    time_limit_s,
)
from serving.servers import parse_methods, reasons_unavailable, running_servers, sizes_for
from serving.token_client import TokenAnswer, TokenClient, ask_servers
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError
from workloads.documents import (
    Document,
    Request,
    ask_about,
    choose,
    describe,
    generate,
    load_leval,
    make_requests,
    tokenise,
)

FEWEST_REQUESTS = 6
"""For each round of a skew, however little time there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose."""

    dataset: Path | None
    alphas: tuple[float, ...]
    methods: tuple[str, ...]
    model_path: Path | None
    layers: int
    """Of the model where none is given, and its hidden size."""
    hidden: int
    documents: int
    scale: float
    """Of generated lengths."""
    context_limit: int
    answer_limit: int
    requests: int
    """Of each round."""
    concurrency: int
    rounds: int
    """Of each skew."""
    time_limit_s: float | None
    device_contexts: float
    host_size: Capacity
    disk_size: Capacity | None
    """None: there is no disk tier."""
    seed: int
    quick: bool

    @property
    def tiny(self) -> TinyModel:
        """The model where none is given: wide for its depth, as a large model is."""
        return TinyModel(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // (128 if self.hidden >= 2048 else 64),  # as in published models
            vocab=512 if self.dataset is None else 8192,
            dtype=precision().dtype,
            max_position=self.context_limit + 4096,
            initializer_range=tame(self.hidden),
        )

    @property
    def source(self) -> str:
        """Of the documents."""
        return "L-Eval format" if self.dataset else f"lengths of Table 1 x {self.scale:g}"


def load(settings: Settings, folder: Path) -> tuple[BenchModel, list[Document]]:
    """The model and the documents in its tokens.

    Raises:
        ConfigError: one of them cannot be read, or a document is too long for the model.
    """
    limits = {"context_limit": settings.context_limit, "answer_limit": settings.answer_limit}
    device = "cuda" if has_gpu() else "cpu"
    if settings.dataset is None:
        model = prepare_model(folder, settings.model_path, settings.tiny, device=device)
        vocabulary = model.ordinary_tokens
        documents = generate(
            settings.documents, vocabulary, scale=settings.scale, seed=settings.seed, **limits
        )
    else:
        texts = choose(load_leval(settings.dataset), settings.documents, seed=settings.seed)
        model = prepare_model(
            folder, settings.model_path, settings.tiny, (each.text for each in texts), device=device
        )
        documents = tokenise(texts, model.encode, **limits)
    longest = max(document.longest for document in documents)
    if longest > model.max_position:
        raise ConfigError(
            f"--context-limit: {settings.context_limit} is not allowed; with its question and answer the longest "
            f"prompt has {longest} tokens, the model takes {model.max_position}"
        )
    return model, documents


class Replay:
    """Asks all methods' servers.

    Args:
        comparison: gets what is measured of a skew as soon as it is over for all methods, or for one of them.
        ends_at: of ``time.monotonic``: no more is asked then than must be; None: it is not looked at.
    """

    def __init__(
        self,
        settings: Settings,
        documents: Sequence[Document],
        clients: dict[str, TokenClient],
        comparison: Comparison,
        progress: Progress,
        ends_at: float | None,
    ) -> None:
        self._comparison = comparison
        self._settings = settings
        self._documents = documents
        self._clients = clients
        self._progress = progress
        self._ends_at = ends_at
        self._turns = itertools.count()

    async def run(self) -> None:
        """All skews; nothing where there is no server."""
        request = ask_about(self._documents[0], 0)
        for client in self._clients.values():  # first-use costs
            await client.ask(request.prompt, max_tokens=2)
        alphas = self._settings.alphas if self._clients else ()
        count = self._settings.rounds
        for number, alpha in enumerate(alphas):
            rounds: list[dict[str, Measured]] = []
            for each in range(count):
                rounds.append({})
                await self._measure(alpha, rounds, rounds_left=(len(alphas) - number) * count - each)

    async def _measure(self, alpha: float, rounds: list[dict[str, Measured]], *, rounds_left: int) -> None:
        """All methods in the last of ``rounds`` of one skew; ``rounds_left`` counts it, and those of other skews."""
        settings, measured = self._settings, rounds[-1]
        seed = settings.seed + len(rounds) - 1
        requests = make_requests(self._documents, settings.requests, alpha=alpha, seed=seed)
        total = len(self._documents) + len(requests)
        which = self._comparison.tell_round(len(rounds))
        task = self._progress.add_task(f"alpha {alpha:g}{which}", total=total)
        ends_at = None
        if self._ends_at is not None:
            now = time.monotonic()
            ends_at = now + (self._ends_at - now) / rounds_left
        for method, client in self._clients.items():
            await client.empty(tiers=method != "recompute")
        for number in np.random.default_rng((settings.seed, 2)).permutation(len(self._documents)):
            await self._ask_all(replace(ask_about(self._documents[number], 0), answer_tokens=1))
            self._progress.advance(task)
        if settings.concurrency == 1:
            asked = {method: Measured() for method in self._clients}
            for number, request in enumerate(requests):
                if ends_at is not None and number >= FEWEST_REQUESTS and time.monotonic() > ends_at:
                    break
                for method, answer in (await self._ask_all(request)).items():
                    asked[method].answers.append(answer)
                    asked[method].busy_s += answer.total_s
                self._progress.advance(task)
            measured |= asked
            self._comparison.add(alpha, rounds)
        else:
            for method in in_turn(self._clients, next(self._turns)):
                client = self._clients[method]
                began = time.monotonic()
                answers = await self._ask_at_once(client, requests)
                measured[method] = Measured(answers, time.monotonic() - began)
                self._comparison.add(alpha, rounds)
                await client.settle()
                self._progress.advance(task, len(requests) / len(self._clients))
        self._progress.remove_task(task)

    async def _ask_all(self, request: Request) -> dict[str, TokenAnswer]:
        """One request to all servers, one at a time; who is first changes. Nobody saves meanwhile."""
        answers = {}
        for method in in_turn(self._clients, next(self._turns)):
            client = self._clients[method]
            answers[method] = await client.ask(request.prompt, max_tokens=request.answer_tokens)
            await client.settle()
        return answers

    async def _ask_at_once(self, client: TokenClient, requests: Sequence[Request]) -> list[TokenAnswer]:
        """All requests to one server, ``concurrency`` at a time; answers in order."""
        free = asyncio.Semaphore(self._settings.concurrency)

        async def ask(request: Request) -> TokenAnswer:
            async with free:
                return await client.ask(request.prompt, max_tokens=request.answer_tokens)

        return list(await asyncio.gather(*map(ask, requests)))


def run(settings: Settings, logs: Path | None, folder: Path, found: Gathered) -> None:
    """Measure everything.

    Raises:
        ConfigError, ServerProcessError, ChatError: what went wrong.
    """
    began = time.monotonic()
    methods = settings.methods
    notes = reasons_unavailable(methods)
    with new_progress() as progress:
        with while_doing(progress, "writing a model, reading documents"):
            model, documents = load(settings, folder)
        lengths = [document.longest for document in documents]
        mean = float(np.mean(lengths))
        context_bytes = mean * model.kv_token_bytes
        sizes = sizes_for(
            device_contexts=settings.device_contexts,
            mean_context=mean,
            longest_context=max(lengths),
            requests_at_once=settings.concurrency > 1,
            host_bytes=settings.host_size.bytes_for(context_bytes),
            disk_bytes=settings.disk_size.bytes_for(context_bytes) if settings.disk_size else 0,
            kv_token_bytes=model.kv_token_bytes,
            quick=settings.quick,
        )
        found.header = {
            **make_header("zipf_replay"),
            "model": model.header,
            "settings": settings_as_json(settings),
            "workload": describe(documents, settings.source),
            "sizes": sizes.as_json() | {"context_bytes_as_kv": int(context_bytes)},
        }
        comparison = Comparison(found, "alpha", settings.alphas, methods, notes, settings.rounds)
        comparison.begin()
        with running_servers(methods, folder, model.path, sizes, progress, logs) as servers:
            ends_at = None if settings.time_limit_s is None else began + settings.time_limit_s
            ask_servers(
                servers,
                lambda clients: Replay(settings, documents, clients, comparison, progress, ends_at).run(),
            )


app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("zipf_replay")
def main(
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="L-Eval JSONL file, or a folder of them: input, instructions, outputs. Default: generated "
            "documents with the lengths of Table 1 of the paper."
        ),
    ] = None,
    alphas: Annotated[str, typer.Option(help="Zipf skews: 0 (uniform) to 2 in the paper.")] = "0,0.5,1,1.5,2",
    methods: Methods = "recompute,kv,auto",
    out: Out = None,
    quick: Quick = False,
    model_path: ModelPath = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the random model. Default: 8.", min=1)] = None,
    hidden: Annotated[int | None, typer.Option(help="Its width. Default: 768, quick 512.", min=64)] = None,
    documents: Annotated[
        int | None, typer.Option(help="Documents, evenly from all files. Default: 16, quick 6.", min=1)
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Factor for all lengths of generated documents, to fit small models. Default: 0.25, "
            "quick 0.08."
        ),
    ] = None,
    context_limit: Annotated[
        int | None,
        typer.Option(help="Longer documents are cut to this many tokens. Default: 4096, quick 1024.", min=64),
    ] = None,
    answer_limit: Annotated[
        int | None, typer.Option(help="Maximum tokens of an answer. Default: 16, quick 4.", min=1)
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests in each round. Default: 64, quick 16.", min=1)
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(help="Concurrent requests. If greater than 1, methods run one after the other.", min=1),
    ] = 1,
    rounds: Rounds = 1,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Minutes from the start. After that, each round stops at 6 requests (with --concurrency "
            "1). Default: none, quick 1.7."
        ),
    ] = None,
    device_contexts: DeviceContexts = 2.0,
    host_size: HostSize = "2",
    disk_size: DiskSize = None,
    disk: Disk = True,
    folder: Folder = None,
    logs: Logs = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    check_positive(device_contexts=device_contexts, scale=scale, time_limit=time_limit)
    if scale is not None and dataset is not None:
        raise ConfigError(
            "--scale: is for generated documents; those of --dataset are cut by --context-limit"
        )
    count = documents or (6 if quick else 16)
    settings = Settings(
        dataset=dataset,
        alphas=parse_numbers("--alphas", alphas, low=0, high=10),
        methods=parse_methods(methods),
        model_path=model_path,
        layers=layers or 8,
        hidden=hidden or (512 if quick else 768),
        documents=count,
        scale=scale or (0.08 if quick else 0.25),
        context_limit=context_limit or (1024 if quick else 4096),
        answer_limit=answer_limit or (4 if quick else 16),
        requests=requests or (16 if quick else 64),
        concurrency=concurrency,
        rounds=rounds,
        time_limit_s=time_limit_s(time_limit, quick=quick),
        device_contexts=device_contexts,
        host_size=parse_capacity("--host-size", host_size),
        disk_size=parse_capacity("--disk-size", disk_size or str(2 * count)) if disk else None,
        seed=seed,
        quick=quick,
    )
    prepare_out(out)
    carry_out(
        "zipf_replay",
        partial(run, settings, logs and logs.absolute()),
        zipf_report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
