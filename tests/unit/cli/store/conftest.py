from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.cli import main as command

Hcache = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hcache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hcache:
    """Runs ``hcache store ARGUMENTS``; returns exit status, standard output and standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hcache", "store", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            command.main()
        shown = capsys.readouterr()
        return int(exit_info.value.code or 0), shown.out, shown.err

    return run
