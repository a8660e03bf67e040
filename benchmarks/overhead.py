"""The tier's cost for requests that it does not help, and its gain for others: a server with it and one without.

Both run at the same time, one idle while the other is measured. Measurements alternate, and each number is the median
of its rounds: saving, decoding, time to first token, startup and memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Container, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from common.command import ENDED_EARLY, carry_out, errors_told, new_app
from common.gathered import Gathered
from common.header import make_header
from common.model import prepare_model
from common.options import (
    AsJson,
    Dtype,
    Folder,
    Logs,
    ModelPath,
    Out,
    Quick,
    Seed,
    parse_whole_numbers,
    prepare_out,
)
from common.statistics import median_with_interval
from common.terminal import new_progress, while_doing
from serving import overhead_report
from serving.lookup import measure_lookup
from serving.options import Disk
from serving.overhead_requests import PairedRequests, Settings, paired_row, section_names
from serving.pair import OFF, TIER, Pair, host_memory_bytes, make_pair, running, start_alone, unique_bytes
from serving.servers import measures_at_start
from serving.token_client import TokenClient, ask_servers
from sglang_hcache.cli.options import parsed
from sglang_hcache.cli.server.cpu_runtime import has_gpu
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS, PlanKind
from sglang_hcache.core.units import SIZE_HELP, parse_size

START, MEMORY, LOOKUP = "start", "memory", "look-up"
"""What is measured beside requests."""


async def measure(
    requests: PairedRequests,
    pair: Pair,
    settings: Settings,
    wanted: Container[str],
    progress: Progress,
    found: Gathered,
) -> None:
    """What running servers are asked, as rows: ``what``, ``off``, ``tier`` (medians) and ``ratio`` of each round."""
    for name, section in requests.sections():
        if name in wanted:
            with while_doing(progress, name):
                found.add(name, await section())
    if MEMORY in wanted:
        with while_doing(progress, MEMORY):
            found.add(MEMORY, _memory(settings, pair))


def run(
    settings: Settings,
    only: Sequence[str],
    model_path: Path | None,
    tiny: TinyModel,
    logs: Path | None,
    folder: Path,
    found: Gathered,
) -> None:
    """Measure everything, or what has one of ``only`` in its name.

    Raises:
        ConfigError, ServerProcessError, ChatError: what went wrong.
    """
    wanted = _wanted(only, [START, *section_names(settings), MEMORY, LOOKUP])
    model = prepare_model(folder, model_path, tiny)
    pair = make_pair(
        folder,
        model.path,
        dtype=tiny.dtype,
        pool_tokens=settings.pool_tokens,
        host_bytes=settings.host_bytes,
        has_disk=settings.has_disk,
        method=settings.method,
        tier_arguments=settings.tier_arguments,
        logs=logs or folder,
    )
    found.header = {
        **make_header("overhead"),
        "model": {**model.header, "dtype": tiny.dtype},
        "settings": asdict(settings),
    }
    found.expect(wanted)
    with new_progress() as progress:
        if settings.starts and START in wanted:
            with while_doing(progress, "starting servers, each alone"):
                start_alone(pair, 0)  # what is read is in the page cache from now on
                found.add(START, _starts([start_alone(pair, number) for number in range(settings.starts)]))
        with running(pair, progress, together=_start_together(settings.method)) as started:
            if not settings.starts and START in wanted:
                if started is None:
                    found.leave_out(START)
                else:
                    found.add(START, _starts([started]))

            def ask(clients: dict[str, TokenClient]) -> Awaitable[None]:
                requests = PairedRequests(settings, model, clients, tiny.dtype)
                return measure(requests, pair, settings, wanted, progress, found)

            ask_servers(pair, ask)
        if LOOKUP in wanted:
            with while_doing(progress, LOOKUP):
                found.add(LOOKUP, _lookups(settings))


def _wanted(only: Sequence[str], names: Sequence[str]) -> list[str]:
    wanted = [name for name in names if not only or any(text in name for text in only)]
    if not wanted:
        raise ConfigError(
            f"--only: nothing has {' or '.join(only)} in its name; there are: {'; '.join(names)}"
        )
    return wanted


def _start_together(method: str) -> bool:
    """Where both may: on a CPU they would wait for each other's threads, and what measures must be alone."""
    return has_gpu() and not measures_at_start(method)


def _starts(starts: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Seconds from launching to serving."""
    row = paired_row("start", {name: [seconds[name] for seconds in starts] for name in (OFF, TIER)})
    added, low, high = median_with_interval([seconds[TIER] - seconds[OFF] for seconds in starts])
    more = {"what": "start: added", "unit": "s", OFF: 0.0, TIER: added, "low": low, "high": high}
    return [row, more]


def _lookups(settings: Settings) -> list[dict[str, Any]]:
    """What a request costs that looks for the longest history in a large disk tier, which has all of it."""
    found = measure_lookup(settings.chunks, settings.long_history)
    among = f"{settings.long_history} tokens among {settings.chunks:,} chunks"
    return [
        {"what": f"keys of {settings.long_history} tokens", "unit": "s", OFF: 0.0, TIER: found.keys_s},
        {"what": f"look-up of {among}", "unit": "s", OFF: 0.0, TIER: found.match_s},
        {
            "what": f"memory of {settings.chunks:,} chunks' names",
            "unit": "bytes",
            OFF: 0.0,
            TIER: found.catalog_bytes,
        },
    ]


def _memory(settings: Settings, pair: Pair) -> list[dict[str, Any]]:
    """Bytes that belong to each server alone, after the same requests. Of --hcache-host-size counts what is resident:
    subtracting what no request has used yet would hide as much of anything else.
    """
    used = {name: float(size) for name, size in unique_bytes(pair).items()}
    host = settings.host_bytes if has_gpu() else host_memory_bytes(pair[TIER])  # pinned as a whole on a GPU
    beyond = used[TIER] - used[OFF] - host
    return [
        {"what": "memory", "unit": "bytes", **used},
        {"what": "memory in --hcache-host-size", "unit": "bytes", OFF: 0.0, TIER: float(host)},
        {"what": "memory beyond --hcache-host-size", "unit": "bytes", OFF: 0.0, TIER: beyond},
    ]


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


app = new_app()


@app.command(help=__doc__, epilog=ENDED_EARLY)
@errors_told("overhead")
def main(
    model_path: ModelPath = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the random model. Default: 24, quick 6.", min=1)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Its hidden size. Default: 512, quick 256.", min=64)
    ] = None,
    dtype: Dtype = "bfloat16",
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of fresh prompts. Default: 2048, quick 512.", min=64)
    ] = None,
    in_a_row: Annotated[
        int,
        typer.Option(help="Fresh prompts one after the other, timed until all is saved. 0: none.", min=0),
    ] = 16,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure only what has this in its name, such as 'return' or 'memory'; may be repeated.",
            show_default=False,
        ),
    ] = None,
    histories: Annotated[
        str | None,
        typer.Option(help="Tokens of histories that return. Default: 1024,4096,16384, quick 1024."),
    ] = None,
    long_history: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the history that returns while others decode. Default: 16384, quick 2048.", min=64
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Numbers of requests that decode together.")] = "1,4",
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds of each measurement. Default: 7, and 21 for short ones (prefill, decoding, device hits); "
            "quick 3 and 9.",
            min=1,
        ),
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Warm-up rounds that do not count.", min=0)] = 3,
    decoded: Annotated[
        int | None,
        typer.Option(
            help="Tokens of answers whose TBT is compared: whole chunks of 64, of which the first does not count. "
            "Default: 192, quick 128.",
            min=2 * CHUNK_TOKENS,
        ),
    ] = None,
    starts: Annotated[
        int | None,
        typer.Option(
            help="Startups of each server alone, after one that does not count. With 0, the startups for the other "
            "measurements are timed, one after the other; on a GPU, with a --method that measures nothing at startup, "
            "both start together, untimed. Default: 3, quick 0.",
            min=0,
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(help="Chunks in the disk tier for the lookup. Default: 1000000, quick 50000.", min=1),
    ] = None,
    host_size: Annotated[
        str | None, typer.Option(help=f"--hcache-host-size: {SIZE_HELP}. Default: 2GB, quick 256MB.")
    ] = None,
    disk: Disk = True,
    method: Annotated[
        str, typer.Option(help=f"--hcache-method, one of {', '.join(PlanKind)}.")
    ] = PlanKind.AUTO.value,
    tier_arguments: Annotated[
        str, typer.Option(help="More arguments for the server with the tier, quoted as in a shell.")
    ] = "",
    folder: Folder = None,
    logs: Logs = None,
    out: Out = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    lengths = histories or ("1024" if quick else "1024,4096,16384")
    if decoded is not None and decoded % CHUNK_TOKENS:
        raise ConfigError(f"--decoded: {decoded} is not allowed; a multiple of {CHUNK_TOKENS}")
    if method not in list(PlanKind):
        raise ConfigError(f"--method: {method!r} is not allowed; allowed: {', '.join(PlanKind)}")
    settings = Settings(
        prompt=prompt or (512 if quick else 2048),
        in_a_row=in_a_row,
        histories=parse_whole_numbers("--histories", lengths, low=64),
        long_history=long_history or (2048 if quick else 16384),
        batches=parse_whole_numbers("--batches", batches, low=1),
        decoded=decoded or (128 if quick else 192),
        rounds=rounds or (3 if quick else 7),
        short_rounds=3 * rounds if rounds else (9 if quick else 21),
        warm_up=warm_up,
        starts=starts if starts is not None else (0 if quick else 3),
        chunks=chunks or (50_000 if quick else 1_000_000),
        host_bytes=parsed("--host-size", parse_size, host_size or ("256MB" if quick else "2GB")),
        has_disk=disk,
        method=method,
        tier_arguments=_words("--tier-arguments", tier_arguments),
        seed=seed,
    )
    layers, hidden = layers or (6 if quick else 24), hidden or (256 if quick else 512)
    tiny = TinyModel(layers=layers, hidden=hidden, heads=hidden // 64, dtype=dtype, max_position=40_000)
    prepare_out(out)
    carry_out(
        "overhead",
        partial(run, settings, only or (), model_path, tiny, logs and logs.absolute()),
        overhead_report,
        folder=folder,
        out=out,
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
