"""A command that is ended early: what it writes and says, what it leaves, and how a second signal ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import typer

ROOT = Path(__file__).parents[3]
NAMES = ("alpha 0", "alpha 1", "alpha 2")


@pytest.fixture
def parts(bench: Callable[[str], Any]) -> SimpleNamespace:
    names = ("command", "gathered", "stopping", "results")
    return SimpleNamespace(**{name: bench(f"common.{name}") for name in names})


# -- results -------------------------------------------------------------------------------------


def test_results_are_complete_or_say_what_is_missing(parts: SimpleNamespace) -> None:
    found = parts.gathered.Gathered()
    found.header = {"benchmark": "x"}
    found.expect(NAMES)
    found.expect(["schedules"], "schedules")
    assert not found.measured
    found.add("alpha 1", [{"alpha": 1, "method": "kv", "unequal": None}], lacks=["auto"])
    found.add("alpha 0", [{"alpha": 0, "unequal": 2}])
    assert found.missing == ["alpha 1: auto", "alpha 2", "schedules"]
    data = found.results()
    assert list(data) == ["benchmark", "seconds", "complete", "missing", "unequal", "rows"]
    assert (data["complete"], data["unequal"]) == (False, 2)
    assert [row["alpha"] for row in data["rows"]] == [0, 1], "in the order of what is expected"
    found.add("alpha 1", [{"alpha": 1, "method": "kv"}, {"alpha": 1, "method": "auto"}])
    found.leave_out("alpha 2")
    found.add("schedules", [{"model": "a"}])
    data = found.results()
    assert (data["complete"], data["missing"]) == (True, [])
    assert [row.get("method") for row in data["rows"]] == [None, "kv", "auto"], "in place of the row before"
    assert data["schedules"] == [{"model": "a"}]


# -- a run in this process -----------------------------------------------------------------------


def carry_out(
    parts: SimpleNamespace,
    folder: Path,
    measure: Callable[[Path, Any], None],
    *,
    out: Path | None,
    shown: list[dict[str, Any]] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Its exit status, and what it showed; that is also put into ``shown``."""
    shown = [] if shown is None else shown

    def write(folder: Path, data: dict[str, Any]) -> None:
        parts.results.write_json(folder / "x.json", data)
        parts.results.write_csv(folder / "x.csv", data["rows"])

    try:
        parts.command.carry_out(
            "x_y",
            measure,
            SimpleNamespace(show=lambda data, _console: shown.append(data), write=write),
            folder=folder,
            out=out,
            as_json=False,
        )
    except typer.Exit as ended:
        return ended.exit_code, shown
    return 0, shown


def measure_until(number: signal.Signals | None, after: int = 1) -> Callable[[Path, Any], None]:
    """Measures ``NAMES`` and gets the signal ``number`` when ``after`` of them are measured."""

    def measure(scratch: Path, found: Any) -> None:
        (scratch / "model").write_text("large")
        found.header = {"benchmark": "x"}
        found.expect(NAMES)
        for count, name in enumerate(NAMES):
            if number is not None and count == after:
                signal.raise_signal(number)
            found.add(name, [{"name": name}])

    return measure


@pytest.mark.parametrize(
    ("number", "status", "cause"),
    [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C"), (signal.SIGHUP, 129, "SIGHUP")],
)
def test_what_is_there_is_written(
    parts: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    status: int,
    cause: str,
) -> None:
    (out := tmp_path / "out").mkdir()
    old = signal.signal(number, signal.SIG_DFL)  # a test run in the background of a script may ignore it
    try:
        assert carry_out(parts, tmp_path, measure_until(number), out=out)[0] == status
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, old)
    data = json.loads((out / "x.json").read_text())
    assert (data["complete"], data["missing"]) == (False, ["alpha 1", "alpha 2"])
    assert data["rows"] == [{"name": "alpha 0"}]
    assert (out / "x.csv").read_text().split() == ["name", "alpha", "0"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert capsys.readouterr().err.splitlines() == [
        f"x_y: ended by {cause}",
        f"  written to {out}: alpha 0",
        "  not measured: alpha 1; alpha 2",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_nobody_reads_is_written(as_json: bool, tmp_path: Path) -> None:
    """``tee`` got Ctrl-C as well. The exit status is that of the signal."""
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3] / 'benchmarks')!r})\n"
        "from common import command, results\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # the background of a script may ignore it
        "class Report:\n"
        "    show = staticmethod(lambda data, console: console.print('x' * 9999))\n"
        "    write = staticmethod(lambda folder, data: results.write_json(folder / 'x.json', data))\n"
        "def measure(scratch, found):\n"
        "    found.expect(['a', 'b'])\n"
        "    found.add('a', [{'name': 'a'}])\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "app = command.new_app()\n"
        "@app.command()\n"
        "@command.errors_told('x')\n"
        "def main() -> None:\n"
        f"    command.carry_out('x', measure, Report, folder=None, out=Path('.'), as_json={as_json})\n"
        "app()\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=writes, stderr=subprocess.PIPE, cwd=tmp_path, text=True
        )
    finally:
        os.close(writes)
    assert (ended.returncode, "ended by Ctrl-C" in ended.stderr) == (130, True), ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert json.loads((tmp_path / "x.json").read_text())["missing"] == ["b"]


def test_the_first_error_is_told(parts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "out" / "x.json").mkdir(parents=True)

    def measure(_scratch: Path, found: Any) -> None:
        found.expect(["alpha 0"])
        found.add("alpha 0", [{"name": "alpha 0"}])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        carry_out(parts, tmp_path, measure, out=tmp_path / "out")
    assert isinstance(error.value.__context__, IsADirectoryError)


def test_what_cannot_be_written_is_printed(parts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "out" / "x.json").mkdir(parents=True)
    shown: list[dict[str, Any]] = []
    with pytest.raises(IsADirectoryError):
        carry_out(parts, tmp_path, measure_until(None), out=tmp_path / "out", shown=shown)
    assert [data["complete"] for data in shown] == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the scratch folder needs room, too"


def test_a_signal_that_is_ignored_stays_ignored(parts: SimpleNamespace, tmp_path: Path) -> None:
    """``nohup``."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert carry_out(parts, tmp_path, measure_until(signal.SIGHUP), out=None)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, old)


def test_without_out_it_is_shown_only(
    parts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (data,) = carry_out(parts, tmp_path, measure_until(signal.SIGTERM, after=2), out=None)
    assert (status, data["missing"]) == (143, ["alpha 2"])
    assert "measured, and not written without --out: alpha 0; alpha 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_where_nothing_is_there(
    parts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "out").mkdir()
    assert carry_out(parts, tmp_path, measure_until(signal.SIGTERM, after=0), out=out) == (143, [])
    assert not list(out.iterdir())
    assert capsys.readouterr().err.splitlines() == [
        "x_y: ended by SIGTERM before anything was measured: there are no results"
    ]


def test_a_signal_after_the_last_row_loses_nothing(
    parts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes while the results are written."""
    (out := tmp_path / "out").mkdir()

    class Late(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().items()

    def measure(_scratch: Path, found: Any) -> None:
        found.expect(["all"])
        found.add("all", [Late(name="a")])

    status, (data,) = carry_out(parts, tmp_path, measure, out=out)
    assert (status, data["complete"]) == (143, True)
    assert json.loads((out / "x.json").read_text())["complete"] is True
    assert "not measured: nothing is missing" in capsys.readouterr().err


def test_an_error_loses_nothing_that_was_measured(parts: SimpleNamespace, tmp_path: Path) -> None:
    def measure(scratch: Path, found: Any) -> None:
        measure_until(None)(scratch, found)
        found.add(NAMES[-1], [], lacks=["kv"])
        raise OSError("the server has gone")

    (out := tmp_path / "out").mkdir()
    shown: list[dict[str, Any]] = []
    with pytest.raises(OSError, match="the server has gone"):
        carry_out(parts, tmp_path, measure, out=out, shown=shown)
    data = json.loads((out / "x.json").read_text())
    assert (data["complete"], data["missing"]) == (False, ["alpha 2: kv"])
    assert len(data["rows"]) == 2
    assert shown == [data]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- reports -------------------------------------------------------------------------------------


def test_reports_take_what_there_is(bench: Callable[[str], Any], tmp_path: Path) -> None:
    """``restore_speed.py`` with a length from a tier, ``overhead.py`` with rows that have no ratio."""
    variants = ("recompute", "kv", "hidden", "hybrid", "auto", "ideal")
    row = {
        "tier": "disk:5MB",
        "length": 256,
        "seconds": 1.0,
        "tokens_per_s": 256.0,
        "num_recompute": 0,
        "stored": "",
        "efficiency": None,
    }
    row |= dict.fromkeys(("predicted_s", "io_s", "compute_s", *bench("restoring.report").RATIOS))
    model = {"layers": 2, "hidden": 64, "heads": 1, "kv_heads": 1}
    data = {"model": model, "rows": [{**row, "variant": variant} for variant in variants]}
    bench("restoring.report").write(tmp_path, data)
    assert (tmp_path / "restore_speed.png").read_bytes().startswith(b"\x89PNG")
    start = {"what": "start: added", "unit": "s", "off": 0.0, "tier": 1.0}
    bench("serving.overhead_report").write(tmp_path, {"rows": [start]})
    assert (tmp_path / "overhead.csv").read_text().count("\n") == 2
    assert not (tmp_path / "overhead.png").exists()


# -- a process of its own ------------------------------------------------------------------------

PROGRAM = """
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from common import stopping
from common.command import carry_out, errors_told, new_app

app = new_app()
stopping.AGAIN_S = float(sys.argv.pop())

def show(data, console):
    print("shown", flush=True)
    if "slow" in sys.argv:
        time.sleep(600)

def measure(folder, found):
    found.expect(["a", "b"])
    found.add("a", [])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    child.wait()

@app.command()
@errors_told("x")
def main(how: str) -> None:
    report = SimpleNamespace(show=show, write=None)
    carry_out("x", measure, report, folder=Path(), out=None, as_json=False)

app()
"""


def start(folder: Path, how: str, again_s: float) -> tuple[subprocess.Popen[str], int]:
    """A command that has measured half of what it should, and its child.

    Args:
        again_s: a signal that comes so much later than another is a second one.
    """
    paths = [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(again_s)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("times", [1, 2])
def test_no_process_is_left(tmp_path: Path, times: int) -> None:
    """``timeout`` sends its signal twice; that is one signal."""
    process, child = start(tmp_path, "fast", 60.0)
    for _ in range(times):
        process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert (process.returncode, output) == (143, "shown\n")
    assert "x: ended by SIGTERM" in errors
    assert "not measured: b" in errors
    assert not psutil.pid_exists(child)
    assert not list(tmp_path.iterdir())


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "slow", 0.1)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "shown\n"  # it would take ten minutes from here
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143
    assert errors == "ended at once: scratch folders may be left\n"
