"""What ``hcache store`` says: each report as text for people and as data for ``--json``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from sglang_hcache.cli.report import Report, counted, new_table
from sglang_hcache.cli.store.text import num_directories
from sglang_hcache.cli.store.verify import VerifyOutcome, speed
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.config import format_floor
from sglang_hcache.store.erasure import Erased
from sglang_hcache.store.format.record import FORMAT_VERSION
from sglang_hcache.store.inspect.check import Finding
from sglang_hcache.store.inspect.maintenance import Change
from sglang_hcache.store.inspect.view import DirectoryInfo, StoreView
from sglang_hcache.store.volumes.health import Condition

_ROWS_SHOWN = 20
_FINDINGS_SHOWN = 50
_STYLES = {"healthy": "green", "read-only": "yellow", "out": "bold red"}


def stat(view: StoreView) -> Report:
    """Sizes, counts and health."""
    directories, runs, totals = view.directories(), view.runs(), view.totals()
    quarantined = sum(len(run.quarantined) for run in runs)
    unavailable = sum(not run.is_available for run in runs)
    is_out = any(item.condition == Condition.OUT for item in directories)
    data = {
        "healthy": not is_out,
        "store_id": view.identity.store_id,
        "format_version": FORMAT_VERSION,
        "lock_holder": None if view.lock_holder is None else view.lock_holder.pid,
        "cap_bytes": view.identity.size_bytes,
        "free_floor_bytes": view.identity.free_floor_bytes,
        "free_floor_percent": view.identity.free_floor_percent,
        "segment_bytes": view.identity.segment_bytes,
        "physical_bytes": sum(item.physical_bytes for item in directories),
        "chunks": view.chunks(),
        "runs": len(runs),
        "segments": len({run.place.segment for run in runs}),
        "namespaces": len({run.place.namespace_id for run in runs}),
        "quarantined_chunks": quarantined,
        "unavailable_runs": unavailable,
        "written_today_bytes": view.written_today_bytes(),
        "totals": totals,
        "directories": [_directory_data(item) for item in directories],
    }
    return Report(data, [_stat_table(view, data), Text(), _directory_table(directories)])


def verification(view: StoreView, outcome: VerifyOutcome) -> Report:
    """What was damaged."""
    quarantined = sum(len(run.quarantined) for run in view.runs())
    chunks = {key for damage in outcome.damages for key in damage.keys}
    directories = view.directories()
    out = [item for item in directories if item.condition == Condition.OUT]
    data = {
        "runs": outcome.runs,
        "checked_bytes": outcome.checked_bytes,
        "seconds": round(outcome.seconds, 3),
        "damaged_chunks": len(chunks),
        "lost_runs": outcome.lost_runs,
        "quarantined_chunks": quarantined,
        "unavailable_runs": outcome.unavailable_runs,
        "damages": [
            {
                "keys": [key.hex() for key in damage.keys],
                "run": damage.run.number,
                "segment": damage.run.place.segment,
                "layer": damage.layer,
                "directory": str(damage.directory),
                "reason": damage.reason,
            }
            for damage in outcome.damages
        ],
        "directories": [_directory_data(item) for item in directories],
    }
    pace = speed(outcome.checked_bytes, outcome.seconds)
    harm = [counted(len(chunks), "damaged chunk")] if chunks else []
    harm += [f"{counted(outcome.lost_runs, 'run')} lost with files or headers"] if outcome.lost_runs else []
    result = ", ".join(harm) or "no damage"
    result += " in what was checked" if out else ""
    lines = [
        Text(
            f"checked {format_bytes(outcome.checked_bytes)} of {counted(outcome.runs, 'run')} "
            f"in {outcome.seconds:.1f} s ({pace}): {result}",
            style="bold red" if harm else "",
        )
    ]
    if chunks:
        lines.append(
            Text(
                "a server recomputes them and no longer serves them; if their number grows, replace the disk",
                "dim",
            )
        )
    if quarantined:
        lines.append(
            Text(f"{counted(quarantined, 'chunk')} in quarantine before (hcache store ls --quarantined)")
        )
    if out:
        lines += [
            Text(
                f"not checked, for want of a directory: {counted(outcome.unavailable_runs, 'run')}",
                "bold red",
            ),
            *(Text(f"  {item.path}: {item.reason}") for item in out),
        ]
    damages = [_damage_table(outcome)] if outcome.damages else []
    return Report(data, [*damages, *lines])


def collected(change: Change) -> Report:
    """What ``gc`` freed."""
    counts = change.counts
    before, after = change.before, change.after
    evicted = counts.get("store.segments_evicted", 0)
    data = {
        **_sizes(change),
        "removed_files": max(0, before.segment_files - after.segment_files),
        "runs_forgotten": counts.get("store.runs_lost", 0),
        "segments_evicted": evicted,
        "chunks_evicted": counts.get("store.chunks_evicted", 0),
        "chunks_expired": counts.get("store.chunks_expired", 0),
    }
    details = []
    if data["removed_files"]:
        details.append(f"{counted(data['removed_files'], 'segment file')} removed")
    if data["runs_forgotten"]:
        details.append(f"{counted(data['runs_forgotten'], 'run')} without files forgotten")
    if evicted:
        details.append(f"{counted(data['chunks_evicted'], 'chunk')} in {counted(evicted, 'segment')} evicted")
    if data["chunks_expired"]:
        details.append(f"{counted(data['chunks_expired'], 'chunk')} deleted for age")
    lines = [Text(_freed(change)), *(Text(f"  {detail}") for detail in details)]
    return Report(data, lines)


def cleared(change: Change) -> Report:
    """What ``clear`` removed, and where files are left."""
    before, directories = change.before, change.after.directories
    data = {
        **_sizes(change),
        "chunks_removed": before.chunks,
        "runs_removed": before.runs,
        "directories": [_directory_data(item) for item in directories],
    }
    what = f"removed {counted(before.chunks, 'chunk')} in {counted(before.runs, 'run')}"
    return Report(data, [Text(f"{what}; {_freed(change)}"), *map(Text, _sick(directories))])


def erased(namespace_ids: Collection[bytes], result: Erased, change: Change) -> Report:
    """What ``clear --namespace`` removed."""
    names = [namespace_id.hex() for namespace_id in namespace_ids]
    data = {
        **_sizes(change),
        "namespaces": names,
        "chunks_removed": result.chunks,
        "runs_removed": result.runs,
    }
    what = f"removed {counted(result.chunks, 'chunk')} in {counted(result.runs, 'run')} of {', '.join(names)}"
    if not result.runs:
        what = f"nothing of {', '.join(names)} is stored"
    return Report(data, [Text(f"{what}; {_freed(change)}")])


def erase_question(views: Sequence[StoreView], namespace_ids: Collection[bytes]) -> str:
    """What is about to be lost of these namespaces, in one store or in those of all ranks."""
    found = [item for view in views for item in view.namespaces() if item.namespace_id in namespace_ids]
    size = format_bytes(sum(item.disk_bytes for item in found))
    models = sorted({item.owner["model"] for item in found if "model" in item.owner})
    whose = f" of {', '.join(models)}" if models else ""
    names = ", ".join(namespace_id.hex() for namespace_id in namespace_ids)
    return (
        f"Remove {counted(sum(item.chunks for item in found), 'chunk')} ({size}){whose}, namespace {names}?"
    )


def clear_question(views: Sequence[StoreView]) -> str:
    """What is about to be lost: all in one store, or in those of all ranks."""
    directories = [item for view in views for item in view.directories()]
    chunks = sum(view.chunks() for view in views)
    size = format_bytes(sum(item.physical_bytes for item in directories))
    paths = [path for view in views for path in view.paths]
    if len(views) > 1:
        paths = list(dict.fromkeys(path.parent for path in paths))
    places = ", ".join(map(str, paths)) + (f" (of {len(views)} ranks)" if len(views) > 1 else "")
    return "\n".join([*_sick(directories), f"Remove all {counted(chunks, 'chunk')} ({size}) from {places}?"])


def _sick(directories: Iterable[DirectoryInfo]) -> list[str]:
    """What clearing leaves where it cannot delete."""
    return [
        f"{item.path} is {item.condition}: {item.reason}; what is there does not count any more once all is "
        "cleared, and is deleted when a server has the directory again"
        for item in directories
        if item.condition != Condition.HEALTHY
    ]


def checked(view: StoreView, findings: Sequence[Finding], done: Sequence[str]) -> Report:
    """What ``fsck`` found, after what ``--rebuild`` did."""
    errors = sum(finding.is_error for finding in findings)
    data = {
        "rebuilt": list(done),
        "runs": len(view.places),
        "errors": errors,
        "findings": [
            {"severity": "error" if item.is_error else "note", "what": item.what, "fix": item.fix}
            for item in findings
        ],
    }
    lines = [Text(line) for line in done]
    for item in findings[:_FINDINGS_SHOWN]:
        kind = Text("error: ", "bold red") if item.is_error else Text("note: ", "yellow")
        lines.append(kind.append(item.what, style="default").append(f"; fix: {item.fix}", style="default"))
    if len(findings) > _FINDINGS_SHOWN:
        lines.append(Text(f"{len(findings) - _FINDINGS_SHOWN:,} more (--json)"))
    result = f"{counted(errors, 'error')}" if errors else "no errors"
    lines.append(
        Text(f"checked {counted(len(view.places), 'run')} in {num_directories(len(view.paths))}: {result}")
    )
    if view.lock_holder is not None:
        lines.append(Text(f"{view.lock_holder} uses the store: files of no run were not looked for", "dim"))
    return Report(data, lines)


# -- parts ---------------------------------------------------------------------------------------


def _stat_table(view: StoreView, data: Mapping[str, Any]) -> Table:
    totals = data["totals"]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    user = "not in use" if view.lock_holder is None else f"in use by {view.lock_holder}"
    table.add_row("store", Text(f"{data['store_id'][:8]}, format {data['format_version']}, {user}"))
    fill = data["physical_bytes"] / max(data["cap_bytes"], 1)
    table.add_row(
        "on disk",
        f"{format_bytes(data['physical_bytes'])} of {format_bytes(data['cap_bytes'])} ({fill:.1%}), "
        f"floor {format_floor(data['free_floor_bytes'], data['free_floor_percent'])} free on each file system",
    )
    places = [counted(data[name], name[:-1]) for name in ("runs", "segments", "namespaces")]
    table.add_row("chunks", f"{data['chunks']:,} in {', '.join(places)}")
    lacking = []
    if data["quarantined_chunks"]:
        lacking.append(f"{counted(data['quarantined_chunks'], 'chunk')} in quarantine")
    if data["unavailable_runs"]:
        lacking.append(f"{counted(data['unavailable_runs'], 'run')} for want of a directory")
    if lacking:
        table.add_row("not served", Text(", ".join(lacking), "bold red"))
    if totals is None:
        table.add_row("counts", Text("not known: the state is missing or damaged", "bold red"))
    else:
        _add_totals(table, totals, data["written_today_bytes"])
    return table


def _add_totals(table: Table, totals: Mapping[str, int], written_today_bytes: int | None) -> None:
    def of(event: str) -> int:
        return totals.get(event, 0)

    table.add_row("hits", f"{counted(of('chunks_read'), 'chunk')} read ({format_bytes(of('bytes_read'))})")
    today = (
        "" if written_today_bytes is None else f", {format_bytes(written_today_bytes)} in the last 24 hours"
    )
    written = f"{counted(of('chunks_written'), 'chunk')} ({format_bytes(of('bytes_written'))}){today}"
    table.add_row("written", f"{written}; {counted(of('writes_refused'), 'write')} refused")
    evicted = f"{counted(of('chunks_evicted'), 'chunk')} with {counted(of('segments_evicted'), 'segment')}"
    expired = f"; {counted(of('chunks_expired'), 'chunk')} deleted for age" if of("chunks_expired") else ""
    table.add_row("evicted", evicted + expired)
    table.add_row(
        "trouble",
        f"{counted(of('corrupt_extents'), 'corrupt read')}, {counted(of('io_errors'), 'I/O error')}",
    )


def _directory_table(directories: Iterable[DirectoryInfo]) -> Table:
    numbers = ["on disk", "free", "segments", "damaged", "I/O errors"]
    table = new_table(["", "directory", "health", *numbers], right={*numbers})
    for item in directories:
        is_known = item.free_bytes >= 0
        health = item.condition + (f": {item.reason}" if item.reason else "")
        table.add_row(
            str(item.stripe),
            Text(str(item.path), overflow="fold"),
            Text(health, style=_STYLES[item.condition]),
            format_bytes(item.physical_bytes) if is_known else "?",
            format_bytes(item.free_bytes) if is_known else "?",
            str(item.segments) if is_known else "?",
            str(item.corrupt_extents),
            str(item.io_errors),
        )
    return table


def _damage_table(outcome: VerifyOutcome) -> Table:
    table = new_table(
        ["chunk", "run", "segment", "layer", "directory", "reason"], right={"run", "segment", "layer"}
    )
    for damage in outcome.damages[:_ROWS_SHOWN]:
        more = f" and {len(damage.keys) - 1} more" if len(damage.keys) > 1 else ""
        table.add_row(
            damage.keys[0].hex()[:16] + more,
            str(damage.run.number),
            str(damage.run.place.segment),
            str(damage.layer),
            Text(str(damage.directory), overflow="fold"),
            Text(damage.reason),
        )
    if len(outcome.damages) > _ROWS_SHOWN:
        table.add_row(f"{len(outcome.damages) - _ROWS_SHOWN} more (--json)", *[""] * 5)
    return table


def _directory_data(item: DirectoryInfo) -> dict[str, Any]:
    return {
        "path": str(item.path),
        "stripe": item.stripe,
        "condition": item.condition,
        "reason": item.reason,
        "physical_bytes": item.physical_bytes,
        "free_bytes": item.free_bytes if item.free_bytes >= 0 else None,
        "segment_files": item.segments,
        "corrupt_extents": item.corrupt_extents,
        "io_errors": item.io_errors,
    }


def _sizes(change: Change) -> dict[str, Any]:
    return {
        "physical_bytes_before": change.before.physical_bytes,
        "physical_bytes": change.after.physical_bytes,
        "chunks": change.after.chunks,
        "runs": change.after.runs,
    }


def _freed(change: Change) -> str:
    before, after = change.before.physical_bytes, change.after.physical_bytes
    left = f"{format_bytes(after)} on disk, {counted(change.after.chunks, 'chunk')}"
    return f"freed {format_bytes(before - after)}: {left}" if after < before else f"nothing to free: {left}"
