from __future__ import annotations

import io
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from sglang_hcache.cli.demo import chat
from sglang_hcache.cli.demo import run as demo
from sglang_hcache.cli.demo.report import DemoReport, TurnResult
from sglang_hcache.cli.demo.run import DemoSettings
from sglang_hcache.cli.demo.view import JsonView, TextView
from sglang_hcache.cli.logbooks import write_scripts
from sglang_hcache.cli.main import app
from sglang_hcache.cli.server import process as server_process
from sglang_hcache.cli.server.answers import AnswerToken, ChatAnswer, TokenSources
from sglang_hcache.cli.server.pair import PairedAnswer
from sglang_hcache.cli.server.process import ServerProcess, ServerProcessError
from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import ConfigError
from tests.waiting import wait_until


def _answer(*, ttft_s: float, disk: int = 0, logprob: float = -1.0) -> ChatAnswer:
    return ChatAnswer(
        text="a",
        tokens=(AnswerToken("a", logprob),),
        sources=TokenSources(device=0, host=0, disk=disk, recomputed=1000 - disk),
        ttft_s=ttft_s,
        total_s=ttft_s,
    )


def _report(*, restored: int = 896, wrong_by: float = 0.0) -> DemoReport:
    first = PairedAnswer(_answer(ttft_s=2.0), _answer(ttft_s=2.0))
    second = PairedAnswer(_answer(ttft_s=1.0, disk=restored, logprob=-1.0 + wrong_by), _answer(ttft_s=3.0))
    return DemoReport(
        turns=(TurnResult(1, 1, first), TurnResult(1, 2, second)),
        pool_tokens=1600,
        disk_bytes=123_000_000,
        disk_chunks=14,
        tier_folder=Path("/somewhere/tier"),
        kept=False,
        wall_s=80.0,
    )


def _run(monkeypatch: pytest.MonkeyPatch, report: DemoReport, *arguments: str) -> tuple[int, str]:
    def fake(_settings: DemoSettings, view: TextView) -> DemoReport:
        for turn in report.turns:
            view.turn(turn)
        view.finish(report)
        return report

    monkeypatch.setattr(demo, "run_demo", fake)
    result = CliRunner().invoke(app, ["demo", *arguments])
    return result.exit_code, result.stdout


def test_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = _run(monkeypatch, _report())
    assert status == 0
    assert "3.00 times faster" in output
    assert "123.0 MB with 14 chunks in /somewhere/tier (removed now)" in output
    assert "All 2 answers equalled the recomputed ones" in output


@pytest.mark.parametrize("wrong_by", [0.01, math.nan])
def test_a_wrong_answer_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, wrong_by: float) -> None:
    report = _report(wrong_by=wrong_by)
    assert report.failure is not None
    assert report.failure.startswith("1 of 2 answers differ from the recomputed ones")
    status, output = _run(monkeypatch, report)
    assert status == 1
    assert "equalled" not in output


def test_a_run_without_restores_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _report(restored=0).failure == "no turn was restored from the tier"
    assert _run(monkeypatch, _report(restored=0))[0] == 1


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = _run(monkeypatch, _report(), "--json")
    assert status == 0
    report = json.loads(output)
    assert [turn["disk_tokens"] for turn in report["turns"]] == [0, 896]
    assert report["returning_turns"]["median_speedup"] == 3.0
    assert report["failure"] is None


def test_lines_of_80_columns() -> None:
    console = Console(force_terminal=True, width=80, height=24, file=io.StringIO(), record=True)
    report = _report()
    view = TextView(console)
    for turn in report.turns:
        view.turn(turn)
    view.finish(report)
    shown = console.export_text()
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert rows.count("turn chat prompt GPU host disk recomputed TTFT (s) off (s) ratio") == 1
    assert rows.count("2 1 1,000 0 0 896 104 1.00 3.00 3.00") == 1  # once: what is above stays as it is
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.rindex("896") < shown.rindex("All 2 answers equalled")


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = _run(monkeypatch, _report())
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("field", "value"), [("conversations", 2), ("conversations", 101), ("turns", 1), ("turns", 101)]
)
def test_wrong_settings_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--{field}: {value} is not allowed"):
        DemoSettings(**{field: value})  # type: ignore[arg-type]


def test_the_servers_leave_their_temporary_files_in_a_folder_that_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = []

    def launch(servers: list[ServerProcess], _progress: object) -> None:
        folders.extend(server._extra_env["TMPDIR"] for server in servers)
        for folder in folders:
            (Path(folder) / "socket").touch()
        raise ServerProcessError("did not start")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "write_tiny_model", lambda *_: None)
    monkeypatch.setattr(demo, "_prompt_lengths", lambda *_: [100])
    monkeypatch.setattr(demo, "launch_together", launch)
    with pytest.raises(ServerProcessError):
        demo.run_demo(DemoSettings(), TextView(Console()))
    assert len(folders) == 2
    assert list(tmp_path.iterdir()) == []


def test_json_goes_to_standard_output_while_a_terminal_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = MagicMock()
    client.__enter__.return_value.tier_state.return_value = None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    monkeypatch.setattr(demo, "write_tiny_model", lambda *_: None)
    monkeypatch.setattr(demo, "_prompt_lengths", lambda *_: [100])
    monkeypatch.setattr(demo, "_servers", lambda *_: (MagicMock(), MagicMock()))
    monkeypatch.setattr(demo, "launch_together", lambda *_: None)
    monkeypatch.setattr(demo, "ServerClient", lambda _: client)
    monkeypatch.setattr(demo, "_talk", lambda *_: _report().turns)
    demo.run_demo(DemoSettings(), JsonView(Console(stderr=True, force_terminal=True)))
    out, err = capsys.readouterr()
    assert len(json.loads(out)["turns"]) == 2
    assert "Talking" in err


def test_a_machine_with_a_gpu_is_told_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    with pytest.raises(ConfigError, match=r"hcache demo --chat"):
        demo.run_demo(DemoSettings(), TextView(Console()))


def test_a_page_on_a_gpu_shows_restores_in_a_type_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for gpu in (False, True):
        monkeypatch.setattr(chat, "has_gpu", lambda gpu=gpu: gpu)
        arguments = chat._server(tmp_path, tmp_path, "")._args
        assert ("float16" in arguments) is ("always" in arguments) is gpu


def test_a_page_whose_server_died_ends_with_what_its_log_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        server_process, "prepare_launch", lambda _: ([sys.executable, "-c", "print('the last word')"], {})
    )
    monkeypatch.setattr(ServerProcess, "wait_ready", lambda *_: None)
    monkeypatch.setattr(chat, "write_tiny_model", lambda *_: None)

    def serve_page(*_: object, is_over: Callable[[], bool], **__: object) -> None:
        wait_until(is_over)

    monkeypatch.setattr(chat, "serve_page", serve_page)
    result = CliRunner().invoke(app, ["demo", "--chat", "--port", "0", "--keep", str(tmp_path)])
    assert isinstance(result.exception, ServerProcessError)
    assert str(result.exception) == "the server died (exit status 0); its log ends with:\n  | the last word"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--conversations", "4", "--chat"],
        ["--turns", "3", "--chat"],
        ["--json", "--chat"],
        ["--host", "127.0.0.1"],
        ["--port", "0"],
        ["--allow-host", "chat.example.org"],
        ["--open"],
        ["--no-open"],
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(ServerProcess, "launch", pytest.fail)
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert isinstance(result.exception, ConfigError)
    name = "--open/--no-open" if "open" in arguments[0] else arguments[0]
    assert str(result.exception).startswith(f"{name}: it belongs to the ")


@pytest.mark.parametrize("page", [[], ["--chat", "--port", "0"]])
def test_a_folder_that_cannot_be_made_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: list[str]
) -> None:
    monkeypatch.setattr(ServerProcess, "launch", pytest.fail)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", *page, "--keep", str(tmp_path / "file" / "tier")])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"--keep: cannot make {tmp_path}/file/tier: ")


@pytest.mark.parametrize("page", [[], ["--chat", "--port", "0"]])
def test_only_a_new_an_empty_or_a_demos_own_folder_is_kept_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: list[str]
) -> None:
    def launch(_: ServerProcess) -> None:
        raise ServerProcessError("not here")

    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    monkeypatch.setattr(demo, "write_tiny_model", lambda *_: None)
    monkeypatch.setattr(demo, "_prompt_lengths", lambda *_: [100])
    monkeypatch.setattr(chat, "write_tiny_model", lambda *_: None)
    monkeypatch.setattr(ServerProcess, "launch", launch)
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "hcache.yaml").write_text("disk_size: 1TiB\n")
    before = sorted(own.iterdir())
    result = CliRunner().invoke(app, ["demo", *page, "--keep", str(own)])
    assert str(result.exception) == f"--keep: {own} holds other files; name a new or empty folder"
    assert isinstance(result.exception, ConfigError)
    assert sorted(own.iterdir()) == before
    for _ in range(2):  # a second run uses the first one's folder
        result = CliRunner().invoke(app, ["demo", *page, "--keep", str(tmp_path / "new")])
        assert isinstance(result.exception, ServerProcessError)
    (settings,) = (tmp_path / "new").glob("hcache-*.yaml")
    config = HCacheConfig.from_settings(yaml.safe_load(settings.read_text()))
    assert config.dirs == (tmp_path / "new" / "tier",)
    assert 2**29 <= config.disk_size <= 2**30
    (tmp_path / "new" / "hcache.yaml").write_text("disk_size: 1TiB\n")
    CliRunner().invoke(app, ["demo", *page, "--keep", str(tmp_path / "new")])
    assert (tmp_path / "new" / "hcache.yaml").read_text() == "disk_size: 1TiB\n"


def test_scripts() -> None:
    scripts = write_scripts(9, 5)
    assert scripts == write_scripts(9, 5)
    assert all(len(script) == 5 for script in scripts)
    openings = {script[0][:60] for script in scripts}
    assert len(openings) == 9  # nothing shared
