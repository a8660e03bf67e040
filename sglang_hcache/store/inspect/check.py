"""Checking the structure of a store: everything but the payloads, which :mod:`verify` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.config import FILE_SLACK_BYTES
from sglang_hcache.store.format.names import (
    PROBE_NAME,
    STATE_NAME,
    STATE_TMP_NAME,
    SUPERBLOCK_TMP_NAME,
)
from sglang_hcache.store.format.place import RunPlace
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.health import Condition
from sglang_hcache.store.volumes.looking import Seen

GC = "hcache store gc"
REBUILD = "hcache store fsck --rebuild"
_FORGETS = f"`{GC}` forgets what is lost"
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    what: str
    """Names the path."""
    fix: str
    is_error: bool = True
    """False: harmless."""


def check(view: StoreView) -> list[Finding]:
    """Compare superblocks, the state and segment files, of which one header a run and directory was read.

    Beside a running server what changes all the time is left out (temporary files, files of no segment).
    """
    findings: list[Finding] = []
    for item in view.sight.seen:
        findings += _directory(view, item)
    findings += _conditions(view)
    findings += [
        Finding(what, f"`{GC}` writes it anew, and so does a server") for what in view.state_problems
    ]
    if view.places and not view.state.serial and not view.state_problems:
        what = f"there is no {STATE_NAME}: what was used, counted and in quarantine is not known"
        findings.append(Finding(what, f"`{GC}` writes one, and so does a server", is_error=False))
    findings += _unread(view)
    findings += _lost(view)
    if view.lock_holder is None:
        findings += _strays(view)
    return findings


def _directory(view: StoreView, item: Seen) -> Iterator[Finding]:
    path, health = item.volume.path, item.volume.health
    if not item.exists:
        fix = f"mount its disk, or if it was replaced make an empty directory there and run `{REBUILD}`"
        yield Finding(f"{path}: {health.reason}", fix)
        return
    if item.superblock is None:
        fix = f"`{REBUILD}` makes a new superblock"
        if health.reason.startswith("it is empty"):
            fix = f"mount its disk, or if it was replaced run `{REBUILD}`, which takes the empty directory in"
        yield Finding(f"{path}: {health.reason}", fix)
    elif not health.readable:
        yield Finding(f"{path}: {health.reason}", "check its device")
        return
    elif item.superblock.identity.epoch < view.identity.epoch:
        what = f"{path}: its superblock is older than others, for the directory was out when they changed"
        yield Finding(what, "none needed: the newest counts", is_error=False)
    try:
        names, strangers = item.volume.attempt(lambda: (item.directory.names(), item.directory.strangers()))
        refusal = "" if item.superblock is None else item.volume.attempt(item.directory.refusal)
    except OSError as error:
        yield Finding(f"{path}: {error.strerror or error}", "check its device")
        return
    if refusal:
        yield Finding(refusal, "do that: until then no server starts")
    if strangers:
        yield Finding(f"{path}: holds other files: {_shown(strangers)}", "move them out of the directory")
    if view.lock_holder is not None:
        return
    left = [name for name in (PROBE_NAME, STATE_TMP_NAME, SUPERBLOCK_TMP_NAME) if name in names]
    if left:
        what = f"{path}: left behind by a crash: {_shown(left)}"
        yield Finding(what, f"`{GC}` removes it, and so does the next start of a server", is_error=False)


def _conditions(view: StoreView) -> Iterator[Finding]:
    """Directories that can be read, but are not written to, or not used by the server; and those without room."""
    for info in view.directories():
        if info.condition != Condition.HEALTHY and view.volumes[info.stripe].health.readable:
            what = f"{info.path}: is {info.condition}: {info.reason}"
            yield Finding(what, "check its device or make room; a server then uses it again by itself")
        if 0 <= info.free_bytes < max(info.floor_bytes, FILE_SLACK_BYTES):
            what = f"{info.path}: {format_bytes(info.free_bytes)} free"
            if info.free_bytes < info.floor_bytes:
                what += (
                    f", less than the floor of {format_bytes(info.floor_bytes)} (--hcache-disk-free-floor)"
                )
            fix = "make room on its disk; else a server deletes chunks there, or stores nothing new"
            yield Finding(what, fix, is_error=False)


def _unread(view: StoreView) -> Iterator[Finding]:
    """Files that could not be read, or not all of them."""
    for number, mask in view.unread.items():
        for stripe, item in enumerate(view.sight.seen):
            if mask >> stripe & 1 and item.volume.health.readable:
                path = item.directory.segment_path(number)
                yield Finding(
                    f"{path}: cannot be read", "check its device; a start tries again, and keeps the file"
                )


def _lost(view: StoreView) -> Iterator[Finding]:
    """Runs that a server knew and that are not whole any more, by segment and by the file that is to blame."""
    for number, count in view.lost.items():
        torn = {place: missing for place, missing in view.torn.items() if place.segment == number}
        for stripe, item in enumerate(view.sight.seen):
            here = [place for place, missing in torn.items() if missing >> stripe & 1]
            if here:
                path = item.directory.segment_path(number)
                yield Finding(f"{path}: {_fault(view, stripe, here)}", _FORGETS)
        unseen = count - len(torn)
        if unseen > 0:
            what = "without the headers that belong there" if view.files.of(number) else "lost with it"
            is_there = "" if view.files.of(number) else "is missing, "
            path = view.sight.seen[0].directory.segment_path(number)
            name = str(path) if len(view.paths) == 1 else path.name
            yield Finding(f"{name}: {is_there}{_runs(unseen)} {what}", _FORGETS)


def _fault(view: StoreView, stripe: int, runs: Sequence[RunPlace]) -> str:
    """What is wrong with a file in directory ``stripe`` in which ``runs`` of its segment are not whole."""
    file = view.files.of(runs[0].segment).get(stripe)
    if file is None:
        return f"is missing, {_runs(len(runs))} lost"
    short = sum(place.ends[stripe] > file.size for place in runs)
    if short:
        return f"ends after {file.size} bytes, {_runs(short)} cut off"
    return f"{_runs(len(runs))} without the header that belongs there"


def _strays(view: StoreView) -> Iterator[Finding]:
    """Files of no run, and what lies behind the last run of a file."""
    ends: dict[tuple[int, int], int] = {}
    for place in view.places:
        for stripe in place.shape.members:
            key = (stripe, place.segment)
            ends[key] = max(ends.get(key, 0), place.ends[stripe])
    for stripe, sizes in view.segment_sizes().items():
        path = view.paths[stripe]
        strays = [
            number
            for number in sizes
            if (stripe, number) not in ends and number not in view.lost and number not in view.unread
        ]
        if strays:
            names = _shown([view.sight.seen[stripe].directory.segment_path(item).name for item in strays])
            size = format_bytes(sum(sizes[number] for number in strays))
            yield Finding(
                f"{path}: segments of no run: {names} ({size})",
                f"`{GC}` removes them, and so does the next start of a server",
                is_error=False,
            )
        tail = sum(
            max(0, size - ends.get((stripe, number), size))
            for number, size in sizes.items()
            if number not in view.unread
        )
        if tail:
            what = f"{path}: {format_bytes(tail)} behind the last runs, as a kill leaves them"
            yield Finding(what, f"`{GC}` frees them, and so does the next start of a server", is_error=False)


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _runs(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"
