"""One command for what only a GPU can show, in under nine minutes. Results so far: ``docs/results-gpu.md``.

python benchmarks/gpu/run.py --out DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, its parts are found beside its folder

import torch

from common.command import ENDED_EARLY, ended_early
from common.gathered import Gathered
from common.header import make_header
from common.results import write_json
from common.stopping import Stopping
from gpu.parts import NOT_SHOWN, PARTS, Part, part_command, run_apart, run_here
from gpu.results import told

UNAVAILABLE = "not available here: no CUDA device"
LOGS = "logs.tar.gz"
_MOST_OF_A_LOG = 300_000
"""Bytes of each server's."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all parts passed, 1 one did not, 2 there is no GPU or an argument is wrong, 130 or 143 it was
    ended by Ctrl-C or SIGTERM.
    """
    options = _options(arguments)
    chosen = [replace(part, budget_s=part.budget_s * options.time_factor) for part in _asked_for(options)]
    if options.dry_run:
        _print_plan(chosen)
        return 0
    if not torch.cuda.is_available():
        print(UNAVAILABLE, file=sys.stderr)
        return 2
    if options.part:
        with Stopping() as stopping:
            stopping.until_stopped(
                lambda: run_here(
                    options.part, lambda name, found: print(told(name, found), flush=True), options.logs
                )
            )
        return stopping.exit_status
    options.out.mkdir(parents=True, exist_ok=True)
    return run_all(chosen, options.out, _header())


def _asked_for(options: argparse.Namespace) -> list[Part]:
    """In the order in which they run."""
    if options.only:
        named = {part.name: part for part in PARTS}
        return [named[name] for name in dict.fromkeys(options.only)]
    return [part for part in PARTS if options.all or not part.is_extra]


def run_all(parts: list[Part], out: Path, header: dict[str, Any]) -> int:
    """Run parts one after the other; ``gpu.json`` is written anew after every result. The exit status."""
    results = GpuResults(parts, out, header)
    with Stopping() as stopping:
        stopping.until_stopped(lambda: _run_parts(parts, out, results))
        if results.found.measured:
            results.finish()
            _draw(results.data, out / "gpu.png")
        if stopping.signal is not None:
            print(ended_early("gpu", stopping, results.found, out), file=sys.stderr)
            return stopping.exit_status
    return 0 if all(part["status"] == "passed" for part in results.data["parts"].values()) else 1


class GpuResults:
    """What ``gpu.json`` holds: the results of each part as they come."""

    def __init__(self, parts: list[Part], out: Path, header: dict[str, Any]) -> None:
        self.found = Gathered()
        self.found.header = header
        self.found.expect(part.name for part in parts)
        self.data: dict[str, Any] = {"header": {}, "parts": {}, "not_shown": NOT_SHOWN}
        self._path = out / "gpu.json"

    def add(self, part: str, name: str, result: dict[str, Any]) -> None:
        """One result of a part that is running."""
        found = self.data["parts"].setdefault(part, {"status": "running", "results": {}})
        found["results"][name] = result
        self.found.add(part, [], lacks=["the rest of it"])
        self.write()

    def end(self, part: str, outcome: dict[str, Any]) -> None:
        """The part is over."""
        found = self.data["parts"].setdefault(part, {"results": {}})
        found |= {name: value for name, value in outcome.items() if name != "results"}
        self.found.add(part, [])
        self.write()

    def finish(self) -> None:
        """No part runs any more."""
        for found in self.data["parts"].values():
            if found["status"] == "running":
                found["status"] = "ended early"
        self.write()

    def write(self) -> None:
        """``gpu.json`` with what there is; whole at any moment, for the machine may be taken away."""
        self.data["header"] = self.found.head()
        new = self._path.with_name(f".{self._path.name}")
        write_json(new, self.data)
        new.replace(self._path)


def _run_parts(parts: list[Part], out: Path, results: GpuResults) -> None:
    left_s = 0.0
    with tempfile.TemporaryDirectory(prefix="hcache-gpu-") as folder:
        said = Path(folder)
        for part in parts:
            name = part.name.replace(" ", "-")
            log, output, servers = out / f"{name}.log", said / f"{name}.out", out / f"{name}-servers"
            servers.mkdir(exist_ok=True)
            with_left = replace(part, budget_s=part.budget_s + left_s)  # of what those before did not use
            command, add = part_command(part.name, servers.absolute()), partial(results.add, part.name)
            try:
                outcome = run_apart(with_left, command, log, output, add)
            finally:
                _shorten(servers)
                _put_away((log, servers), said, out / LOGS)
            left_s = max(0.0, with_left.budget_s - outcome["seconds"])
            results.end(part.name, outcome)
            print(
                f"{part.name}: {outcome['status']} in {outcome['seconds']:.0f} s {outcome.get('why', '')}",
                flush=True,
            )


def _shorten(servers: Path) -> None:
    """Of long logs of servers their ends; the folder goes where there are none."""
    for log in servers.iterdir():
        said = log.read_bytes()
        if len(said) > _MOST_OF_A_LOG:
            log.write_bytes(b"[...]\n" + said[-_MOST_OF_A_LOG:])
    with contextlib.suppress(OSError):
        servers.rmdir()


def _put_away(found: Sequence[Path], said: Path, archive: Path) -> None:
    """``found`` to what the parts have said, and all of that anew into one file: machines are lent that send few
    back.
    """
    for each in found:
        if each.exists():
            shutil.move(each, said / each.name)
    new = archive.with_name(f".{archive.name}")
    with tarfile.open(new, "w:gz") as file:
        for path in sorted(said.iterdir()):
            file.add(path, path.name)
    new.replace(archive)


def _draw(data: dict[str, Any], path: Path) -> None:
    try:
        from gpu.picture import draw

        draw(data, path)
    except Exception as error:  # the numbers are written; a picture is worth no failed run
        print(f"no picture: {type(error).__name__}: {error}", file=sys.stderr)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ENDED_EARLY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help=f"folder for gpu.json, gpu.png and {LOGS}"
    )
    parser.add_argument(
        "--only", action="append", choices=names, help="run only this part; may be repeated, in any order"
    )
    parser.add_argument(
        "--all", action="store_true", help="also run the parts that do not fit into nine minutes"
    )
    parser.add_argument(
        "--time-factor",
        type=_factor,
        default=1.0,
        metavar="X",
        help="multiply the time limits of all parts by X, on a slow machine or if SGLang has not compiled its "
        "kernels yet",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be run")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--logs", type=Path, default=Path("logs"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return factor


def _print_plan(parts: list[Part]) -> None:
    for part in parts:
        command = json.dumps(part_command(part.name, Path("logs")))
        print(f"{part.name}: at most {part.budget_s:g} s: {part.what}\n    {command}")
    print(f"at most {sum(part.budget_s for part in parts):g} s together")
    for what, why in NOT_SHOWN.items():
        print(f"not shown: {what}: {why}")


def _header() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    gpu = {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return make_header("gpu") | {"gpu": gpu}


if __name__ == "__main__":
    sys.exit(main())
