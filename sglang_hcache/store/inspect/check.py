"""Checking the structure of a store: everything but the payloads, which :mod:`verify` reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_hcache.core.errors import CorruptExtentError, StoreError
from sglang_hcache.core.units import format_bytes
from sglang_hcache.store.format.names import INDEX_NAME, PROBE_NAME, SUPERBLOCK_TMP_NAME
from sglang_hcache.store.format.record import check_header, parse_header
from sglang_hcache.store.format.rows import RunPlace
from sglang_hcache.store.inspect.view import StoreView
from sglang_hcache.store.volumes.health import Condition
from sglang_hcache.store.volumes.looking import Seen

GC = "hcache store gc"
REBUILD = "hcache store fsck --rebuild"
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
    """Compare superblocks, index and segment files. Reads one header a run and directory.

    Beside a running server what changes all the time is left out (temporary files, files of no segment), and
    what is missing counts only if a second look finds it missing again.
    """
    findings: list[Finding] = []
    for item in view.sight.seen:
        findings += _directory(view, item)
    findings += _conditions(view)
    findings += _index(view)
    parts = _parts(view)
    if parts and view.lock_holder is not None:
        with StoreView.open(view.paths) as now:
            again = _parts(now)
        parts = {place: again[place] for place in parts if place in again}
    findings += parts.values()
    if view.lock_holder is None and not view.index_problem:
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
    elif item.superblock.identity.epoch < view.identity.epoch:
        what = f"{path}: its superblock is older than others, for the directory was out when they changed"
        yield Finding(what, "none needed: the newest counts", is_error=False)
    try:
        names, strangers = item.volume.attempt(lambda: (item.directory.names(), item.directory.strangers()))
    except OSError as error:
        yield Finding(f"{path}: {error.strerror or error}", "check its device")
        return
    if strangers:
        yield Finding(f"{path}: holds other files: {_shown(strangers)}", "move them out of the directory")
    if view.lock_holder is not None:
        return
    left = [name for name in (PROBE_NAME, SUPERBLOCK_TMP_NAME) if name in names]
    if left:
        yield Finding(f"{path}: left behind by a crash: {_shown(left)}", f"`{GC}` removes it")
    if INDEX_NAME in names and item.volume.stripe != view.identity.index_stripe:
        yield Finding(f"{path}: holds an old index", f"`{GC}` removes it")


def _conditions(view: StoreView) -> Iterator[Finding]:
    """Directories that can be read, but are not written to, or not used by the server."""
    for info in view.directories():
        if info.condition != Condition.HEALTHY and view.volumes[info.stripe].health.readable:
            what = f"{info.path}: is {info.condition}: {info.reason}"
            yield Finding(what, "check its device or make room; a server then uses it again by itself")


def _index(view: StoreView) -> Iterator[Finding]:
    home = view.paths[view.identity.index_stripe]
    if view.is_index_slow:
        what = f"{view.index_problem}: it is slow or hangs, which says nothing of what is in the index"
        fix = f"check its device and look again; `{REBUILD}` would forget what was used last and what is damaged"
        yield Finding(what, fix)
    elif view.index_problem:
        yield Finding(view.index_problem, f"`{REBUILD}` or the next start of a server makes it anew")
    bad = len(view.contents.bad_rows)
    if bad:
        what = f"{home}: {bad} {'row' if bad == 1 else 'rows'} of the index make no sense"
        yield Finding(what, f"`{GC}` forgets them")


def _parts(view: StoreView) -> dict[tuple[int, int], Finding]:
    """What is wrong with the files of segments, by directory and segment."""
    runs: dict[tuple[int, int], list[RunPlace]] = defaultdict(list)
    for place in view.contents.runs.values():
        for stripe, size in enumerate(place.shape.part_bytes):
            if size:
                runs[stripe, place.segment].append(place)
    sizes = view.segment_sizes()
    found: dict[tuple[int, int], Finding] = {}
    for (stripe, segment), here in sorted(runs.items(), key=lambda item: item[0]):
        if stripe in sizes:
            finding = _part(view, stripe, segment, sizes[stripe].get(segment), here)
            if finding is not None:
                found[stripe, segment] = finding
    return found


def _part(
    view: StoreView, stripe: int, segment: int, size: int | None, runs: Sequence[RunPlace]
) -> Finding | None:
    """What is wrong with the file of ``segment`` in directory ``stripe``, which should hold ``runs``."""
    item = view.sight.seen[stripe]
    path = item.directory.segment_path(segment)
    if size is None:
        return Finding(f"{path}: is missing, {_runs(len(runs))} lost", f"`{GC}` forgets what is lost")
    short = sum(place.ends[stripe] > size for place in runs)
    if short:
        what = f"{path}: ends after {size} bytes, {_runs(short)} cut off"
        return Finding(what, f"`{GC}` forgets what is lost")
    try:
        blocks = item.volume.call(
            lambda: item.directory.read_blocks(
                segment, [place.offsets[stripe] for place in runs], item.volume.goes_on
            ),
            "cannot read",
        )
    except StoreError as error:
        return Finding(f"{path}: {error}", "check its device")
    reasons = [
        reason for place, block in zip(runs, blocks, strict=True) if (reason := _bad(stripe, place, block))
    ]
    if not reasons:
        return None
    what = f"{path}: {_runs(len(reasons))} without the header that belongs there ({reasons[0]})"
    return Finding(what, f"`{REBUILD}` forgets what is lost")


def _bad(stripe: int, place: RunPlace, block: bytes) -> str:
    """Why ``block`` is not the first header of the run in directory ``stripe``; empty if it is."""
    shape = place.shape
    first = next(layer for layer in range(len(shape.chunk_layer_bytes)) if shape.stripe(layer) == stripe)
    try:
        check_header(parse_header(block), place, first)
    except CorruptExtentError as error:
        return str(error)
    return ""


def _strays(view: StoreView) -> Iterator[Finding]:
    """Files of no run, and what lies behind the last run of a file."""
    ends: dict[tuple[int, int], int] = {}
    for place in view.contents.runs.values():
        for stripe in place.shape.members:
            key = (stripe, place.segment)
            ends[key] = max(ends.get(key, 0), place.ends[stripe])
    for stripe, sizes in view.segment_sizes().items():
        path = view.paths[stripe]
        strays = [number for number in sizes if (stripe, number) not in ends]
        if strays:
            names = _shown([view.sight.seen[stripe].directory.segment_path(item).name for item in strays])
            size = format_bytes(sum(sizes[number] for number in strays))
            yield Finding(f"{path}: segments of no run: {names} ({size})", f"`{GC}` removes them")
        tail = sum(max(0, size - ends.get((stripe, number), size)) for number, size in sizes.items())
        if tail:
            what = f"{path}: {format_bytes(tail)} behind the last runs, as a kill leaves them"
            yield Finding(what, f"`{GC}` frees them, and so does the next start of a server", is_error=False)


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(sorted(names)[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _runs(count: int) -> str:
    return "1 run is" if count == 1 else f"{count} runs are"
