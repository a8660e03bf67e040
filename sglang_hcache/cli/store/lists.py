"""What ``hcache store ls`` lists."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from sglang_hcache.cli.report import Report, counted, new_table
from sglang_hcache.cli.store.text import ago, first_of, iso_time
from sglang_hcache.core.layout import CHUNK_TOKENS
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.inspect.view import NamespaceInfo, RunInfo, StoreView


def list_runs(view: StoreView, limit: int) -> Report:
    """The newest runs."""
    runs = view.runs()
    shown = [(run, view.written_at(run.place)) for run in first_of(reversed(runs), limit)]
    data = {"runs": [_run_data(run, written) for run, written in shown], "of": len(runs)}
    if not runs:
        return Report(data, [Text("no run is stored")])
    columns = [
        "run",
        "namespace",
        "tokens",
        "chunks",
        "on disk",
        "segment",
        "directories",
        "written",
        "state",
    ]
    table = new_table(columns, right={"run", "tokens", "chunks", "on disk", "segment"})
    for run, written in shown:
        place = run.place
        table.add_row(
            str(run.number),
            place.namespace_id.hex()[:8],
            f"{place.first_chunk * CHUNK_TOKENS}-{(place.first_chunk + len(place.keys)) * CHUNK_TOKENS - 1}",
            str(len(place.keys)),
            format_bytes(run.disk_bytes),
            str(place.segment),
            ",".join(str(stripe) for stripe in place.shape.members),
            ago(written),
            _state(run),
        )
    summary = f"{len(shown)} of {counted(len(runs), 'run')}, the newest first"
    more = " (--limit 0 lists all)" if len(shown) < len(runs) else ""
    note = "tokens: position in the prompt; written: when its segment was written to last"
    return Report(data, [table, Text(summary + more), Text(note, style="dim")])


def list_namespaces(view: StoreView, limit: int) -> Report:
    """The largest namespaces."""
    found = view.namespaces()
    shown = list(first_of(found, limit))
    data = {
        "namespaces": [
            {
                "namespace": item.namespace_id.hex(),
                "chunks": item.chunks,
                "runs": item.runs,
                "disk_bytes": item.disk_bytes,
                "written_at": iso_time(item.written_at),
                "oldest_at": iso_time(item.oldest_at),
                "owner": dict(item.owner),
            }
            for item in shown
        ],
        "of": len(found),
    }
    if not found:
        return Report(data, [Text("no run is stored")])
    table = new_table(
        ["namespace", "model", "weights", "tenant", "chunks", "runs", "on disk", "oldest", "newest"],
        right={"chunks", "runs", "on disk"},
    )
    # `clear` is given what is copied from here.
    table.columns[0].no_wrap, table.columns[0].min_width = True, 32
    for item in shown:
        table.add_row(
            item.namespace_id.hex(),
            Text(item.owner.get("model", "?")),  # a folder's name, which may hold what rich takes for markup
            Text(item.owner.get("weights", "?")),
            Text(_tenant(item)),
            f"{item.chunks:,}",
            f"{item.runs:,}",
            format_bytes(item.disk_bytes),
            ago(item.oldest_at),
            ago(item.written_at),
        )
    summary = Text(f"{len(shown)} of {counted(len(found), 'namespace')}, the largest first")
    note = "tenant: the first 8 digits of `printf %s TENANT | sha256sum`; ?: not noted (yet: within a minute)"
    return Report(data, [table, summary, Text(note, "dim")])


def list_quarantined(view: StoreView, limit: int) -> Report:
    """Chunks that are damaged and not served."""
    found = [
        (run, chunk, why) for run in reversed(view.runs()) for chunk, why in sorted(run.quarantined.items())
    ]
    shown = list(first_of(found, limit))
    data = {
        "quarantined": [
            {
                "key": run.place.keys[chunk].hex(),
                "run": run.number,
                "segment": run.place.segment,
                "chunk": chunk,
                "directory": str(view.directory_of(why) or ""),
                "reason": why,
            }
            for run, chunk, why in shown
        ],
        "of": len(found),
    }
    if not found:
        return Report(data, [Text("no chunk is in quarantine")])
    table = new_table(["chunk", "run", "segment", "directory", "reason"], right={"run", "segment"})
    for run, chunk, why in shown:
        directory = view.directory_of(why)
        table.add_row(
            run.place.keys[chunk].hex()[:16],
            str(run.number),
            str(run.place.segment),
            Text("?" if directory is None else str(directory), overflow="fold"),
            Text(why if directory is None else why.removeprefix(f"{directory}/")),
        )
    summary = Text(
        f"{len(shown)} of {counted(len(found), 'chunk')} in quarantine; eviction removes them in time"
    )
    return Report(data, [table, summary])


def _run_data(run: RunInfo, written_at: float | None) -> dict[str, Any]:
    place = run.place
    return {
        "run": run.number,
        "namespace": place.namespace_id.hex(),
        "first_token": place.first_chunk * CHUNK_TOKENS,
        "chunks": len(place.keys),
        "layers": len(place.shape.chunk_layer_bytes),
        "disk_bytes": run.disk_bytes,
        "segment": place.segment,
        "directories": list(place.shape.members),
        "written_at": iso_time(written_at),
        "available": run.is_available,
        "quarantined_chunks": len(run.quarantined),
    }


def _tenant(item: NamespaceInfo) -> str:
    if not item.owner:
        return "?"
    adapter = item.owner.get("adapter")
    return item.owner.get("tenant", "none") + (f", adapter {adapter}" if adapter else "")


def _state(run: RunInfo) -> Text:
    if not run.is_available:
        return Text("unavailable", "bold red")
    if run.quarantined:
        return Text(f"{len(run.quarantined)} quarantined", "yellow")
    return Text("ok", "green")
