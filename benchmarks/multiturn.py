"""Conversations that return: TTFT and time between tokens over the request rate, each method on its own server.

The HCache paper's Figures 4, 9 and 10. Conversations arrive as a Poisson process whatever the server does. The next
message follows an answer after some think time, and its prompt is everything said before. Methods take turns at each
rate, with everything emptied in between, and all must give the same answers. All of them get the same history: the
first method's answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
from common.precision import tame
from common.terminal import new_progress, while_doing
from common.turns import in_turn
from serving import multiturn_report
from serving.comparison import Comparison, Measured
from serving.options import (
    Capacity,
    DeviceContexts,
    DiskSize,
    HostSize,
    Methods,
    Rounds,
    parse_capacity,
    settings_as_json,
    time_limit_s,
)
from serving.servers import ServerSizes, parse_methods, reasons_unavailable, running_servers, sizes_for
from serving.token_client import TokenAnswer, TokenClient, ask_servers
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError
from workloads.conversations import (
    Conversation,
    Workload,
    detect_format,
    generate,
    load_mooncake,
    load_sharegpt,
    place_trace,
    schedule,
    tokenise,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose."""

    dataset: Path | None
    kind: str
    """Of the data set: sharegpt, mooncake, or generated."""
    rates: tuple[float, ...]
    methods: tuple[str, ...]
    model_path: Path | None
    conversations: int
    """Of a trace: requests."""
    mean_rounds: float
    think_time_s: float
    scale: float
    max_tokens: int
    device_contexts: float
    host_size: Capacity
    disk_size: Capacity
    rounds: int
    """Of each rate."""
    time_limit_s: float | None
    seed: int
    quick: bool

    @property
    def tiny(self) -> TinyModel:
        """The model where none is given."""
        layers, hidden = (6, 384) if self.quick else (8, 768)
        vocab = 512 if self.dataset is None else 8192
        return TinyModel(
            layers=layers,
            hidden=hidden,
            heads=hidden // 64,
            vocab=vocab,
            max_position=self.max_tokens + 64,
            initializer_range=tame(hidden),
        )


def load(settings: Settings, folder: Path) -> tuple[BenchModel, Workload]:
    """The model and what it will be asked.

    Raises:
        ConfigError: one of them cannot be read, or nothing fits the model.
    """
    path, kind, count, seed = settings.dataset, settings.kind, settings.conversations, settings.seed
    texts = []
    if kind == "sharegpt" and path is not None:
        texts = load_sharegpt(path)[:count]
        spoken = (text for rounds in texts for pair in rounds for text in pair)
        model = prepare_model(folder, settings.model_path, settings.tiny, spoken)
    else:
        model = prepare_model(folder, settings.model_path, settings.tiny)
    if settings.max_tokens > model.max_position:
        raise ConfigError(
            f"--max-tokens: {settings.max_tokens} is not allowed; the model takes {model.max_position}"
        )
    limits = {"most_tokens": settings.max_tokens, "seed": seed}
    vocabulary = model.ordinary_tokens
    if kind == "mooncake" and path is not None:
        return model, place_trace(load_mooncake(path), count, vocabulary, scale=settings.scale, **limits)
    if texts:
        rounds, source = tokenise(texts, model.encode, settings.scale), "ShareGPT format"
    else:
        rounds = generate(count, settings.mean_rounds, vocabulary, scale=settings.scale, seed=seed)
        source = f"lengths of Figure 3 x {settings.scale:g}"
    return model, schedule(source, rounds, think_time_s=settings.think_time_s, **limits)


class Talk:
    """Holds the conversations of a workload with one server after the other."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._said: dict[tuple[int, int], tuple[int, ...]] = {}

    async def hold(self, client: TokenClient, rate: float, on_answer: Any) -> Measured:
        """All conversations at ``rate`` requests a second; answers in the workload's order."""
        began = time.monotonic()
        talks = (
            self._hold_one(client, number, conversation, began + conversation.start / rate, on_answer)
            for number, conversation in enumerate(self._workload.conversations)
        )
        answers = [answer for each in await asyncio.gather(*talks) for answer in each]
        return Measured(answers, time.monotonic() - began)

    async def _hold_one(
        self, client: TokenClient, number: int, conversation: Conversation, at: float, on_answer: Any
    ) -> list[TokenAnswer]:
        history: tuple[int, ...] = ()
        answers = []
        for place, message in enumerate(conversation.rounds):
            await asyncio.sleep(max(at - time.monotonic(), 0.0))
            history += message.tokens
            answer = await client.ask(history, max_tokens=message.answer_tokens)
            answers.append(answer)
            on_answer()
            history += self._said.setdefault((number, place), answer.tokens)
            at = time.monotonic() + (
                conversation.pauses_s[place] if place < len(conversation.pauses_s) else 0
            )
        return answers


async def measure(
    settings: Settings,
    workload: Workload,
    clients: dict[str, TokenClient],
    comparison: Comparison,
    progress: Progress,
    ends_at: float | None,
) -> None:
    """All methods at each rate, in turns; fewer rates where ``ends_at`` of ``time.monotonic`` comes first."""
    talk = Talk(workload)
    turns = itertools.count()
    for client in clients.values():  # first-use costs
        await client.ask(workload.conversations[0].rounds[0].tokens, max_tokens=2)
    answering_s = 0.0  # what a rate took at most beyond its arrivals and pauses
    for place, rate in enumerate(settings.rates if clients else ()):
        began = time.monotonic()
        least_s = workload.least_s(rate) * len(clients) * settings.rounds
        if ends_at is not None and place and began + least_s + answering_s > ends_at:
            for left_out in settings.rates[place:]:
                comparison.leave_out(left_out)
                comparison.found.header["rates_left_out"].append(left_out)
            break
        rounds: list[dict[str, Measured]] = []
        for number in range(1, settings.rounds + 1):
            rounds.append({})
            for method in in_turn(clients, next(turns)):
                await clients[method].empty(tiers=method != "recompute")
                what = f"{rate:g} requests/s, {method}{comparison.tell_round(number)}"
                task = progress.add_task(what, total=len(workload.rounds))
                rounds[-1][method] = await talk.hold(clients[method], rate, partial(progress.advance, task))
                await clients[method].settle()  # what it still writes must not slow the next one
                progress.remove_task(task)
                comparison.add(rate, rounds)
        answering_s = max(answering_s, time.monotonic() - began - least_s)


def size_servers(settings: Settings, workload: Workload, model: BenchModel) -> ServerSizes:
    """Caches in contexts: whole conversations of mean length."""
    lengths = [conversation.tokens for conversation in workload.conversations]
    mean = sum(lengths) / len(lengths)
    return sizes_for(
        device_contexts=settings.device_contexts,
        mean_context=mean,
        longest_context=max(lengths),
        requests_at_once=True,
        host_bytes=settings.host_size.bytes_for(mean * model.kv_token_bytes),
        disk_bytes=settings.disk_size.bytes_for(mean * model.kv_token_bytes),
        kv_token_bytes=model.kv_token_bytes,
        quick=settings.quick,
    )


def describe(workload: Workload) -> dict[str, Any]:
    """What is said, for the header: lengths are those of what is sent."""
    lengths = [conversation.tokens for conversation in workload.conversations]
    rounds = workload.rounds
    return {
        "source": workload.source,
        "conversations": len(lengths),
        "requests": len(rounds),
        "left_out": workload.left_out,
        "mean_input_tokens": sum(len(item.tokens) for item in rounds) / len(rounds),
        "mean_output_tokens": sum(item.answer_tokens for item in rounds) / len(rounds),
        "mean_context_tokens": sum(lengths) / len(lengths),
        "longest_context_tokens": max(lengths),
    }


def run(settings: Settings, logs: Path | None, folder: Path, found: Gathered) -> None:
    """Measure everything.

    Raises:
        ConfigError, ServerProcessError, ChatError: what went wrong.
    """
    began = time.monotonic()
    methods = settings.methods
    notes = reasons_unavailable(methods)
    with new_progress() as progress:
        with while_doing(progress, "writing a model, reading conversations"):
            model, workload = load(settings, folder)
        sizes = size_servers(settings, workload, model)
        found.header = {
            **make_header("multiturn"),
            "model": model.header,
            "settings": settings_as_json(settings),
            "workload": describe(workload),
            "sizes": sizes.as_json(),
            "rates_left_out": [],
        }
        comparison = Comparison(found, "rate", settings.rates, methods, notes, settings.rounds)
        comparison.begin()
        least_s = sum(map(workload.least_s, settings.rates)) * (len(methods) - len(notes)) * settings.rounds
        progress.console.print(
            f"{len(workload.rounds)} requests for each rate, round and method: at least {least_s / 60:.1f} minutes, in "
            "which they arrive and people think",
            soft_wrap=True,
        )
        with running_servers(methods, folder, model.path, sizes, progress, logs) as servers:
            ends_at = None if settings.time_limit_s is None else began + settings.time_limit_s
            ask_servers(
                servers, lambda clients: measure(settings, workload, clients, comparison, progress, ends_at)
            )


app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("multiturn")
def main(
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="ShareGPT-format JSON, or the Mooncake trace (JSONL). Default: generated conversations with the "
            "lengths of Figure 3 of the paper."
        ),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Average requests per second. Default: 0.25,1, quick 3,12.")
    ] = None,
    methods: Methods = "recompute,kv,auto",
    out: Out = None,
    quick: Quick = False,
    model_path: ModelPath = None,
    conversations: Annotated[
        int | None,
        typer.Option(
            help="Conversations, or requests of a trace. Default: 8, quick 5; for a trace 32, quick 12.",
            min=1,
        ),
    ] = None,
    mean_rounds: Annotated[
        float, typer.Option(help="Mean rounds of generated conversations. Default: 3.", min=2, max=1000)
    ] = 3.0,
    think_time: Annotated[
        float | None,
        typer.Option(help="Mean seconds between an answer and the next message. Default: 5, quick 0.5."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Factor for all lengths, to fit small models. Default: 1, quick 0.2."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longer conversations end early, longer requests are left out. Default: 4096, quick 1024.",
            min=64,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Minutes from the start. After the first rate, none begins that would not end by then. "
            "Default: none, quick 1.7."
        ),
    ] = None,
    device_contexts: DeviceContexts = 2.0,
    host_size: HostSize = "4",
    disk_size: DiskSize = None,
    rounds: Rounds = 1,
    folder: Folder = None,
    logs: Logs = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    check_positive(device_contexts=device_contexts, think_time=think_time, scale=scale, time_limit=time_limit)
    kind = "generated" if dataset is None else detect_format(dataset)
    count = conversations or ((12 if quick else 32) if kind == "mooncake" else (5 if quick else 8))
    settings = Settings(
        dataset=dataset,
        kind=kind,
        rates=parse_numbers("--rates", rates or ("3,12" if quick else "0.25,1"), low=0.001, high=1000),
        methods=parse_methods(methods),
        model_path=model_path,
        conversations=count,
        mean_rounds=mean_rounds,
        think_time_s=think_time or (0.5 if quick else 5.0),
        scale=scale or (0.2 if quick else 1.0),
        max_tokens=max_tokens or (1024 if quick else 4096),
        device_contexts=device_contexts,
        host_size=parse_capacity("--host-size", host_size),
        disk_size=parse_capacity("--disk-size", disk_size or str(2 * count)),
        rounds=rounds,
        time_limit_s=time_limit_s(time_limit, quick=quick),
        seed=seed,
        quick=quick,
    )
    prepare_out(out)
    carry_out(
        "multiturn",
        partial(run, settings, logs and logs.absolute()),
        multiturn_report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
