"""One command for what only a GPU can show, in under nine minutes. ``docs/gpu.md`` says what came of it.

python benchmarks/gpu/run.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, its parts are found beside its folder

import torch

from common.header import make_header
from common.results import write_json
from gpu.parts import NOT_SHOWN, PARTS, Part, part_command, run_apart, run_here
from gpu.results import told

UNAVAILABLE = "not available here: no CUDA device"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all parts passed, 1 one did not, 2 there is no GPU or an argument is wrong."""
    options = _options(arguments)
    chosen = [
        part
        for part in PARTS
        if (part.name in options.only if options.only else options.all or not part.is_extra)
    ]
    if options.dry_run:
        _print_plan(chosen)
        return 0
    if not torch.cuda.is_available():
        print(UNAVAILABLE, file=sys.stderr)
        return 2
    if options.part:
        run_here(options.part, lambda name, found: print(told(name, found), flush=True))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    return 0 if run_all(chosen, options.out, _header()) else 1


def run_all(parts: list[Part], out: Path, header: dict[str, Any]) -> bool:
    """Run parts one after the other; ``gpu.json`` is written anew after every result. Whether all passed."""
    data: dict[str, Any] = {"header": header, "parts": {}, "not_shown": NOT_SHOWN}
    path = out / "gpu.json"
    for part in parts:
        found: dict[str, Any] = {"status": "running", "results": {}}
        data["parts"][part.name] = found
        write_json(path, data)

        def on_result(name: str, result: dict[str, Any], found: dict[str, Any] = found) -> None:
            found["results"][name] = result
            write_json(path, data)

        log = out / f"{part.name.replace(' ', '-')}.log"
        outcome = run_apart(part, part_command(part.name), log, on_result)
        found |= {name: value for name, value in outcome.items() if name != "results"}
        write_json(path, data)
        print(
            f"{part.name}: {found['status']} in {found['seconds']:.0f} s {found.get('why', '')}", flush=True
        )
    _draw(data, out / "gpu.png")
    return all(found["status"] == "passed" for found in data["parts"].values())


def _draw(data: dict[str, Any], path: Path) -> None:
    try:
        from gpu.picture import draw

        draw(data, path)
    except Exception as error:  # the numbers are written; a picture is worth no failed run
        print(f"no picture: {type(error).__name__}: {error}", file=sys.stderr)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder for gpu.json, gpu.png and logs"
    )
    parser.add_argument(
        "--only", action="append", choices=names, help="this part; may be given several times"
    )
    parser.add_argument(
        "--all", action="store_true", help="also the models that nine minutes have no room for"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _print_plan(parts: list[Part]) -> None:
    for part in parts:
        print(
            f"{part.name}: at most {part.budget_s:g} s: {part.what}\n    {json.dumps(part_command(part.name))}"
        )
    print(f"at most {sum(part.budget_s for part in parts):g} s together")
    for what, why in NOT_SHOWN.items():
        print(f"not shown: {what}: {why}")


def _header() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    gpu = {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return make_header("gpu") | {"gpu": gpu}


if __name__ == "__main__":
    sys.exit(main())
