"""``hcache top``: what a running server's tier does, now and since it started."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sglang_hcache.cli.options import ApiKey, AsJson, ServerUrl
from sglang_hcache.cli.report import new_table, print_report, restore_times, seconds_text, waiting_times
from sglang_hcache.cli.server.answers import ChatError
from sglang_hcache.cli.server.client import (
    FOREIGN_ERRORS,
    FOREIGN_STATE,
    ServerClient,
    UnreachableError,
    shown_address,
)
from sglang_hcache.cli.signals import terminated_as_interrupted
from sglang_hcache.cli.terminal import redraws
from sglang_hcache.cli.unwell import ERRORS, directory_problems, directory_text, other_problems
from sglang_hcache.core.errors import ConfigError, HCacheError
from sglang_hcache.core.metrics import events_of
from sglang_hcache.core.units import format_bytes

_BAR_WIDTH = 16
_LONGEST_S = 3600
_PATIENCE_S = 10.0
_RATES: tuple[tuple[str, str | tuple[str, ...], str], ...] = (
    ("requests that looked", "lookup.requests", ""),
    ("  found something", "lookup.hits", ""),
    ("  miss a chunk that was evicted", "lookup.missed_evicted", ""),
    ("  miss one that was not there", "lookup.missed_new", ""),
    ("restores done", "restore.done", ""),
    ("  seconds that they saved", "restore.saved_seconds", ""),
    ("  seconds lost by restores", tuple(events_of("lost_seconds")), ""),
    ("  tokens from host memory", "restore.tokens_host", ""),
    ("  tokens from disk", "restore.tokens_disk", ""),
    ("  predicted slower, recomputed", "restore.declined_slower", ""),
    ("  no room in the KV pool, recomputed", "restore.no_slots", ""),
    ("  restores failed", "restore.failed", "bad"),
    ("  restores failed on another rank", "restore.failed_on_another_rank", "bad"),
    ("  restores late", ("restore.late", "restore.try_late"), "bad"),
    ("chunks saved", "host.chunks_sealed", ""),
    ("  to disk", "demote.chunks_written", ""),
    *((f"  dropped: {why}", event, "bad") for event, why in events_of("chunks_dropped").items()),
    ("bytes read from disk", "store.bytes_read", "bytes"),
    ("bytes written to disk", "store.bytes_written", "bytes"),
    ("I/O errors", "store.io_errors", "bad"),
    ("damaged data found", "store.corrupt_extents", "bad"),
    ("writes refused: no room", "store.writes_refused", "bad"),
    ("deletions of files that failed", "store.unlink_failures", "bad"),
    ("unexpected errors", ERRORS, "bad"),
)
"""What it is, the counters or measures that add up to it, and how it is shown."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tier's state at one time."""

    at: float
    """``time.monotonic``."""
    state: Mapping[str, Any]


def top(
    url: ServerUrl = "http://127.0.0.1:30000",
    api_key: ApiKey = None,
    interval: Annotated[
        float,
        typer.Option(
            help="Seconds between samples. An answer may take as long, or 10 seconds if that is longer.",
            min=0.1,
            max=_LONGEST_S,
        ),
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print once and exit. Takes two samples, `--interval` apart; with `--json` one."
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Print problems, one per line, and exit with status 1 if there are any.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the tier of a running server: sizes, hits, restores, health. Press Ctrl-C to quit.

    Reads `/server_info`, so `--enable-metrics` is not needed. Problems come first; a short window cuts the end. Restore
    times are averages since the last sample, or since startup if no restore has ended since. With `--json` each sample
    is the whole state on one line. A later answer that fails or takes too long is reported, and the next one is tried;
    with `--once` and `--check`, and at the first one, the command ends with exit status 2.

    `--check` is for monitoring. It reports a directory that is unhealthy or has no room, saving that has stopped
    (unless the method stores nothing), a clear that a restart would undo, and unexpected errors since startup. Exit
    status 2: no server answers, or it has no tier.
    """
    if math.isnan(interval):  # which is neither below the least nor above the most
        raise ConfigError(f"--interval: {interval} is not allowed; from 0.1 to {_LONGEST_S} seconds")
    with ServerClient(url, api_key=api_key, timeout_s=max(_PATIENCE_S, interval)) as client:
        url = shown_address(url)
        first = _first_look(client)
        if check:
            _check(first.state, as_json=as_json)
        elif as_json:
            _print_json(client, first, None if once else interval)
        elif once:
            time.sleep(interval)
            print_report([render(url, _look(client), first)])
        elif not redraws(Console()):
            _print_looks(client, url, interval, first)
        else:
            _watch(client, url, interval, first)


def _look(client: ServerClient) -> Sample:
    state = client.tier_state()
    if state is None:
        raise HCacheError("--url: the server runs without the tier (--hierarchical-cache hcache)")
    return Sample(time.monotonic(), state)


def _first_look(client: ServerClient) -> Sample:
    try:
        return _look(client)
    except UnreachableError as error:
        raise ChatError(f"{error}; is a server running there? --url names another") from error


@contextmanager
def _own_state() -> Iterator[None]:
    """Around what reads a state: one of another version ends in a line that says so."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise HCacheError(f"--url: {FOREIGN_STATE} ({error!r})") from error


def _check(state: Mapping[str, Any], *, as_json: bool) -> None:
    with _own_state():
        problems = [*directory_problems(state), *other_problems(state)]
    for line in [json.dumps({"problems": problems})] if as_json else problems:
        print(line)
    if problems:
        raise typer.Exit(1)


def _print_json(client: ServerClient, sample: Sample, interval: float | None) -> None:
    print(json.dumps(sample.state), flush=True)
    if interval is not None:
        with suppress(KeyboardInterrupt):
            for later in _later_looks(client, interval):
                print(json.dumps(later.state), flush=True)


def _print_looks(client: ServerClient, url: str, interval: float, last: Sample) -> None:
    """Into a pipe or a file, until Ctrl-C: a picture that is drawn over would show nothing before its end."""
    print_report([render(url, last, None)])
    with suppress(KeyboardInterrupt):
        for sample in _later_looks(client, interval):
            print_report([Text(), render(url, sample, last)])
            sys.stdout.flush()
            last = sample


def _later_looks(client: ServerClient, interval: float) -> Iterator[Sample]:
    """Without end. A server that does not answer may come back."""
    while True:
        time.sleep(interval)
        try:
            sample = _look(client)
        except ChatError as error:
            print(f"hcache: {error}", file=sys.stderr, flush=True)
            continue
        yield sample


def _watch(client: ServerClient, url: str, interval: float, last: Sample) -> None:
    """Until Ctrl-C. A server that does not answer may come back."""
    console = Console(highlight=False)
    live = Live(render(url, last, None), console=console, auto_refresh=False)
    with terminated_as_interrupted():
        try:  # not "with live": a signal while that begins would leave the cursor hidden
            live.start(refresh=True)
            while True:
                time.sleep(interval)
                try:
                    sample = _look(client)
                except ChatError as error:
                    live.update(render(url, last, None, trouble=str(error)), refresh=True)
                    continue
                live.update(render(url, sample, last), refresh=True)
                last = sample
        except KeyboardInterrupt:
            return
        finally:
            live.stop()


def render(url: str, sample: Sample, before: Sample | None, *, trouble: str = "") -> Group:
    """One picture. What went wrong is at its beginning, for a low window cuts the end; what might have, nowhere.

    Args:
        before: an earlier look, for rates; None: totals only. Nothing of it counts if the server was started since.
        trouble: why there is no newer look.

    Raises:
        HCacheError: the state is not that of this version.
    """
    with _own_state():
        if before is not None and _has_begun_anew(sample.state, before.state):
            before = replace(before, state={"counters": {}, "measures": {}})
        title = _title(url, sample.state, None if before is None else before.state)
        if trouble:
            title = Text.assemble((trouble, "bold red"), "\n", title)
        return Group(title, Text(), _sizes(sample.state), Text(), _counts(sample, before))


def _has_begun_anew(state: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether the server was started again: something happened less often than ``before``."""
    now, then = _occurrences(state), _occurrences(before)
    return any(now.get(name, 0) < count for name, count in then.items())


def _occurrences(state: Mapping[str, Any]) -> dict[str, float]:
    return {**state["counters"], **{name: each["count"] for name, each in state["measures"].items()}}


def _title(url: str, state: Mapping[str, Any], before: Mapping[str, Any] | None) -> Text:
    waiting = ", ".join(f"{count} {phase}" for phase, count in state["requests"].items() if count)
    text = Text.assemble((url, "bold"), f"  namespace {state['namespace'] or 'not known yet: new weights'}")
    text.append(f"\nrequests: {waiting or 'none waits'}; {state['captured_requests']} being saved")
    text.append(f"; slots in flight: {state['in_flight_tokens']:,}")
    text.append("; saving" if state["saving"] else "")
    for what, times_of in (("a restore takes", restore_times), ("requests waited", waiting_times)):
        recent = [] if before is None else times_of(state["measures"], before["measures"])
        times = [
            f"{phase} {seconds_text(seconds)}" for phase, seconds in recent or times_of(state["measures"])
        ]
        since = "lately" if recent else "since the start"
        text.append(f"\n{what} on average, {since}: {', '.join(times)}" if times else "")
    for problem in (*other_problems(state), *directory_problems(state)):
        text.append(f"\n{problem}", "bold red")
    wrong = [
        f"{what.strip()} {_amount(total, kind)}"
        for what, names, kind in _RATES
        if kind == "bad" and names is not ERRORS and (total := _total(state, names))
    ]
    text.append(f"\nsince the start: {', '.join(wrong)}" if wrong else "", "red")
    return text


def _sizes(state: Mapping[str, Any]) -> Group:
    table = new_table(("tier", "", "used", "of", "chunks", ""), {"used", "of", "chunks"})
    host = state["host"]
    used, chunks = host["slots"] - host["free"], host["clean"] + host["dirty"]
    note = f"{host['dirty']:,} not written yet" if state["disk"] else "no disk tier"
    note += f"; {used - chunks:,} more unfinished" if used > chunks else ""
    size, capacity = used * host["chunk_bytes"], host["slots"] * host["chunk_bytes"]
    _add_tier(table, "host", size, capacity, chunks, note)
    disk = state["disk"]
    if disk is None:
        return Group(table)
    budget = disk["write_budget_bytes"]
    most = "" if budget is None else f" of {format_bytes(budget)}"
    note = f"{disk['engine']}; {format_bytes(disk['written_today_bytes'])}{most} written in 24 h"
    _add_tier(table, "disk", disk["bytes"], disk["cap_bytes"], disk["chunks"], note)
    # Below the table, as wide as the window: long paths are folded there, not cut.
    well = [directory for directory in disk["directories"] if directory["takes_writes"]]
    directories = [Text(f"      {directory_text(directory)}", overflow="fold") for directory in well]
    return Group(table, *directories)


def _add_tier(table: Table, name: str, used: int, capacity: int, chunks: int, note: str) -> None:
    bar = ProgressBar(total=max(1, capacity), completed=used, width=_BAR_WIDTH)
    table.add_row(name, bar, format_bytes(used), format_bytes(capacity), f"{chunks:,}", note)


def _counts(sample: Sample, before: Sample | None) -> Table:
    table = new_table(("", "since start", "per second"), {"since start", "per second"})
    for what, names, kind in _RATES:
        total = _total(sample.state, names)
        if kind == "bad" and not total:
            continue
        rate = ""
        if before is not None:
            seconds = sample.at - before.at
            gained = total - _total(before.state, names)
            rate = _amount(gained / seconds, kind) if gained else ""
        style = "red" if kind == "bad" else "dim" if not total else ""
        table.add_row(what, _amount(total, kind), rate, style=style)
    return table


def _total(state: Mapping[str, Any], names: str | tuple[str, ...]) -> float:
    """Since the start."""
    counters, measures = state["counters"], state["measures"]
    events = (names,) if isinstance(names, str) else names
    return float(sum(counters.get(name, 0) + measures.get(name, {}).get("sum", 0) for name in events))


def _amount(value: float, kind: str) -> str:
    if kind == "bytes":
        return format_bytes(int(value))
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"
