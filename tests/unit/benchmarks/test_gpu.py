"""The GPU's command without a GPU: what it says, and that one part stops no other."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

MOST_SECONDS = 9 * 60
ISSUE_SHAPES = {"llama-2-7b", "llama-2-13b", "opt-30b", "llama-3-8b", "qwen3-8b", "gemma-7b"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(
    bench: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("gpu.run").main(["--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "not available here: no CUDA device\n"
    assert not (tmp_path / "results").exists()


def test_a_slow_machine_gets_more_time(
    bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = bench("gpu.run")
    assert command.main(["--dry-run", "--only", "kernel", "--time-factor", "2.5"]) == 0
    assert "kernel: at most 50 s" in capsys.readouterr().out
    for wrong in ("0", "-1", "inf", "nan", "long"):
        with pytest.raises(SystemExit):
            command.main(["--dry-run", "--time-factor", wrong])
        assert f"'{wrong}' is no number above 0" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_run(
    bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    parts, command = bench("gpu.parts"), bench("gpu.run")

    def said(*arguments: str) -> str:
        assert command.main(["--dry-run", *arguments]) == 0
        return capsys.readouterr().out

    some, whole = said(), said("--all")
    for part in parts.PARTS:
        told = f"{part.name}: at most {part.budget_s:g} s"
        assert told in whole
        assert (told in some) is not part.is_extra
    for what in parts.NOT_SHOWN:
        assert f"not shown: {what}" in some
    assert said("--only", "kernel").count("--part") == 1


def test_all_parts_together_keep_to_the_time(bench: Callable[[str], Any]) -> None:
    parts = bench("gpu.parts").PARTS
    assert sum(part.budget_s for part in parts if not part.is_extra) < MOST_SECONDS
    assert len({part.name for part in parts}) == len(parts)
    assert {
        part.name.removeprefix("model ") for part in parts if part.name.startswith("model ")
    } == ISSUE_SHAPES


def test_parts_run_in_the_order_in_which_they_are_asked_for(
    bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine may be taken away: what matters most comes first."""
    assert bench("gpu.run").main(["--dry-run", "--only", "zipf", "--only", "kernel", "--only", "zipf"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if " at most " in line] == ["zipf", "kernel"]


@pytest.mark.parametrize(
    ("memory", "name"), [(150e9, "llama-2-13b"), (85e9, "llama-2-7b"), (None, "llama-2-13b")]
)
def test_both_servers_of_overhead_fit_on_the_device(
    memory: float | None, name: str, bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = bench("gpu.serving")
    monkeypatch.setattr(serving, "has_gpu", lambda: memory is not None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(total_memory=memory)
    )
    assert serving.overhead_shape().name == name


SERVED = """
import json, pathlib, sys
logs = pathlib.Path(sys.argv[1])
(logs / "tier.log").write_text("a" * 400_000 + "the end")
(logs / "off.log").write_text("it began")
print("RESULT " + json.dumps({"name": "a", "ok": True}), flush=True)
"""


def test_logs_of_servers_are_kept(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, command = bench("gpu.parts"), bench("gpu.run")
    monkeypatch.setattr(
        command, "part_command", lambda _name, logs: [sys.executable, "-c", SERVED, str(logs)]
    )
    assert command.run_all([parts.Part("served", 60.0, "")], tmp_path, {}) == 0
    header = json.loads((tmp_path / "gpu.json").read_text())["header"]
    assert (header["complete"], header["missing"]) == (True, [])
    logs = logs_in(tmp_path)
    assert logs.keys() == {"served.log", "served.out", "served-servers/off.log", "served-servers/tier.log"}
    assert logs["served-servers/off.log"] == "it began"
    assert logs["served-servers/tier.log"].endswith("aathe end")
    assert len(logs["served-servers/tier.log"]) < 301_000


def test_what_parts_ask_of_commands_can_be_asked(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their arguments are read, and lead to what the parts are for."""
    serving, seen = bench("gpu.serving"), {}

    def run_command(command: str, arguments: Any, on_row: Any) -> None:
        module = bench(command)
        monkeypatch.setattr(
            module, "carry_out", lambda _name, measure, *_, **__: seen.update({command: measure})
        )
        module.app([*arguments, "--json"], standalone_mode=False)
        on_row({"what": "TTFT", "alpha": 1.0, "method": "kv", "times": [1.0], "unequal": 0})

    monkeypatch.setattr(serving, "run_command", run_command)
    told: dict[str, Any] = {}
    serving.measure_overhead(told.__setitem__, tmp_path)
    serving.measure_zipf(told.__setitem__, tmp_path)
    assert told.keys() == {"TTFT", "alpha 1, kv"}
    assert all(found["ok"] for found in told.values())
    overhead, only, _model, _tiny, logs = seen["overhead"].args
    assert (overhead.tier_arguments, only) == ((), ())
    assert (overhead.method, overhead.has_disk, overhead.starts, logs) == ("hidden", False, 0, tmp_path)
    assert overhead.pool_tokens > 16384 + 16 * (128 + overhead.decoded)
    monkeypatch.setattr(bench("serving.servers"), "has_gpu", lambda: True)
    pair = bench("serving.pair").make_pair(
        tmp_path, tmp_path, dtype="float16", pool_tokens=1, host_bytes=1, has_disk=False, method="hidden",
        tier_arguments=("--page-size", "16"), logs=tmp_path,
    )  # fmt: skip
    assert pair["tier"]._args[-2:] == ("--page-size", "16")
    assert "--page-size" not in pair["off"]._args
    assert all("--cuda-graph-bs-prefill" in server._args for server in pair.values())
    settings, logs = seen["zipf_replay"].args
    assert (settings.disk_size, logs) == (None, tmp_path)
    assert settings.tiny.hidden // settings.tiny.heads == 128
    documents = bench("workloads.documents").generate(
        settings.documents, np.arange(300), scale=settings.scale, seed=0, context_limit=8192, answer_limit=8
    )
    assert 6000 < np.mean([document.longest for document in documents]) < 8000


@pytest.mark.parametrize("status", [0, 2])
def test_rows_of_a_command_are_passed_on_also_if_it_fails(
    status: int, bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serving, rows = bench("gpu.serving"), []
    script = 'import json, sys\nprint(json.dumps({"rows": [sys.argv[1:], 2]}))\nsys.exit(%d)\n'
    (tmp_path / "some.py").write_text(script % status)
    monkeypatch.setattr(serving, "__file__", str(tmp_path / "gpu" / "serving.py"))
    with pytest.raises(CalledProcessError) if status else nullcontext():
        serving.run_command("some", ["--all"], rows.append)
    assert rows == [["--all", "--json"], 2]


def test_an_unknown_part_is_refused(bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("gpu.run").main(["--only", "everything"])
    assert ended.value.code == 2
    assert "invalid choice: 'everything'" in capsys.readouterr().err


SCRIPTS = {
    # First: later it would have the time that others left.
    "hanging": "print('RESULT ' + json.dumps({'name': 'a', 'ok': True}), flush=True); time.sleep(600)",
    "good": "print('RESULT ' + json.dumps({'name': 'a', 'ok': True}), flush=True)",
    "wrong": "print('RESULT ' + json.dumps({'name': 'a', 'ok': False}), flush=True)",
    "blind": "print('RESULT ' + json.dumps({'name': 'a', 'ok': True, 'mutants_taken': ['m']}), flush=True)",
    "silent": "pass",
    "broken": "print('RESULT ' + json.dumps({'name': 'a', 'ok': True}), flush=True); raise ValueError('it broke')",
    "killed": "import os; os.kill(os.getpid(), 9)",
}
EXPECTED = {
    "good": "passed",
    "wrong": "failed",
    "blind": "failed",
    "silent": "failed",
    "broken": "error",
    "hanging": "timeout",
    "killed": "error",
}


def logs_in(out: Path) -> dict[str, str]:
    """Of the parts, by name; there is nothing else in ``out`` that a machine that is lent would have to send back."""
    assert {path.name for path in out.iterdir()} <= {"gpu.json", "gpu.png", "logs.tar.gz"}
    with tarfile.open(out / "logs.tar.gz") as archive:
        files = [each for each in archive.getmembers() if each.isfile()]
        return {file.name: archive.extractfile(file).read().decode() for file in files}  # type: ignore[union-attr]


def leap(monkeypatch: pytest.MonkeyPatch, parts: Any, seconds: float, is_time: Callable[[], bool]) -> None:
    """The clock of ``parts`` goes forward by ``seconds`` once ``is_time()``."""
    left = [seconds]

    def monotonic() -> float:
        if left[0] and is_time():
            left[0] = 0.0
        return time.monotonic() + seconds - left[0]

    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def run_script(name: str, _logs: Path) -> list[str]:
    """In place of ``part_command``."""
    return [sys.executable, "-c", "import json, time\n" + SCRIPTS[name]]


def test_one_part_stops_no_other(
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts, command = bench("gpu.parts"), bench("gpu.run")
    monkeypatch.setattr(command, "part_command", run_script)
    seen: list[dict[str, Any]] = []
    write = command.write_json

    def write_json(path: Path, data: dict[str, Any]) -> None:
        write(path, data)
        seen.append(json.loads(path.read_text()))

    monkeypatch.setattr(command, "write_json", write_json)
    chosen = [parts.Part(name, 120.0, "") for name in SCRIPTS]
    leap(monkeypatch, parts, 1000.0, lambda: any(each["parts"]["hanging"]["results"] for each in seen))
    assert command.run_all(chosen, tmp_path, {"date": "today"}) == 1
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: found["status"] for name, found in data["parts"].items()} == EXPECTED
    assert data["parts"]["broken"]["why"] == "ValueError: it broke"
    assert data["parts"]["hanging"]["results"] == {"a": {"ok": True}}
    assert data["not_shown"] == parts.NOT_SHOWN
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    logs = logs_in(tmp_path)
    assert logs.keys() == {f"{name}.{kind}" for name in SCRIPTS for kind in ("log", "out")}
    assert "ValueError: it broke" in logs["broken.log"]
    assert logs["wrong.out"].startswith("RESULT ")
    assert "hanging: timeout in" in capsys.readouterr().out
    while_it_hung = [each["parts"]["hanging"] for each in seen if "hanging" in each["parts"]]
    assert {"status": "running", "results": {"a": {"ok": True}}} in while_it_hung, (
        "written as soon as it was known"
    )


LATE = """
import json, os, signal, sys, time

def end(*_):  # not by print, in which the signal may come
    os.write(1, b"RESULT " + json.dumps({"name": "last", "ok": True}).encode() + b"\\n")
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_part_says_what_it_has_before_its_time_is_over(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as the rows of a command, which come when it ends."""
    parts, found = bench("gpu.parts"), {}
    part, files = parts.Part("late", 1000.0, ""), (tmp_path / "late.log", tmp_path / "late.out")
    leap(
        monkeypatch,
        parts,
        0.91 * part.budget_s,
        lambda: files[1].exists() and "ready" in files[1].read_text(),
    )
    outcome = parts.run_apart(part, [sys.executable, "-c", LATE], *files, found.__setitem__)
    assert (outcome["status"], outcome["results"], found) == ("timeout", 1, {"last": {"ok": True}})
    assert outcome["seconds"] < part.budget_s


def test_a_part_may_use_what_those_before_left(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts, command = bench("gpu.parts"), bench("gpu.run")
    budgets = []

    def run_apart(part: Any, *_: object) -> dict[str, Any]:
        budgets.append(part.budget_s)
        return {"status": "passed", "seconds": {"a": 4.0, "b": 50.0, "c": 1.0}[part.name]}

    monkeypatch.setattr(command, "run_apart", run_apart)
    command.run_all([parts.Part(name, 10.0, "") for name in "abc"], tmp_path, {})
    assert budgets == [10.0, 16.0, 10.0]


ENDED = """
import json, os, signal, sys, time

def say(name):
    print("RESULT " + json.dumps({"name": name, "ok": True}), flush=True)

def end(*_):
    say("last")  # such as the rows that a command of it has by then
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
if sys.argv[1] != "silent":
    say("first")
if sys.argv[1] != "good":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""


@pytest.mark.parametrize("first", ["good", "silent"])
def test_a_run_that_is_ended_has_what_was_there(
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: str,
) -> None:
    parts, command = bench("gpu.parts"), bench("gpu.run")
    monkeypatch.setattr(command, "part_command", lambda name, _logs: [sys.executable, "-c", ENDED, name])
    chosen = [parts.Part(name, 120.0, "") for name in (first, "ended", "later")]
    assert command.run_all(chosen, tmp_path, {}) == 143
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["header"]["complete"] is False
    ok = {"ok": True}
    assert logs_in(tmp_path).keys() == {
        f"{name}.{kind}" for name in (first, "ended")[: 1 + (first == "good")] for kind in ("log", "out")
    }
    if first == "silent":  # and so nothing was finished, but what it says when it is ended counts
        assert data["parts"] == {"silent": {"status": "ended early", "results": {"last": ok}}}
        assert data["header"]["missing"] == ["silent: the rest of it", "ended", "later"]
        return
    assert {name: found["status"] for name, found in data["parts"].items()} == {
        "good": "passed",
        "ended": "ended early",
    }
    assert data["parts"]["ended"]["results"] == {"first": ok, "last": ok}
    assert data["header"]["missing"] == ["ended: the rest of it", "later"]
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "gpu: ended by SIGTERM" in capsys.readouterr().err


def test_the_picture_takes_what_there_is(bench: Callable[[str], Any], tmp_path: Path) -> None:
    kernel = {"results": {"llama-2-7b": {"of_a_plain_copy": 0.8}, "63 tokens": {"ok": True}}}
    model = {"results": {"hidden": {"milliseconds": 3.0, "recompute_milliseconds": 20.0}, "self-check": {}}}
    data = {"header": {}, "parts": {"kernel": kernel, "restores": {}, "model llama-2-7b": model}}
    bench("gpu.picture").draw(data, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_configurations_are_those_of_the_shapes(bench: Callable[[str], Any]) -> None:
    """Read as SGLang reads them."""
    from transformers import AutoConfig

    for shape in bench("gpu.shapes").SHAPES:
        config = AutoConfig.for_model(**shape.config)
        assert config.num_hidden_layers == shape.num_layers
        assert config.hidden_size == shape.hidden_size
        assert config.num_attention_heads == shape.heads
        assert getattr(config, "num_key_value_heads", shape.heads) == shape.kv_heads
        assert getattr(config, "head_dim", None) in (None, shape.head_dim)
