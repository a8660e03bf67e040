"""``.ci/run`` finds the processes that were started from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.plugins import hcache_forks

SCRIPT = Path(__file__).parents[2] / ".ci/run"
NAME, VALUE = "HCACHE_CI_RUN", "1-2345"


def found() -> list[int]:
    function = re.search(r"^marked_pids\(\) \{.*?^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[0]
    command = ["bash", "-euo", "pipefail", "-c", f"mark={NAME}={VALUE}\n{function}\nmarked_pids"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [int(pid) for pid in said.split()]


def test_by_their_environment_or_by_the_title_that_has_taken_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    forked: list[str] = []

    def start(command: list[str], **_: Any) -> SimpleNamespace:
        forked.extend(command)
        return SimpleNamespace(pid=0)

    with monkeypatch.context() as patch:
        patch.setattr(hcache_forks.subprocess, "Popen", start)
        hcache_forks.ForkServer({NAME: VALUE})._started().close()
    options: Any = {"stdin": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(waiting, env={NAME: VALUE}, **options) as plain,
        subprocess.Popen([*waiting, *forked], env={}, **options) as titled,
        subprocess.Popen([*waiting, f"{NAME}=1-9"], env={NAME: "1-9"}, **options),
    ):
        assert sorted(found()) == sorted([plain.pid, titled.pid])
