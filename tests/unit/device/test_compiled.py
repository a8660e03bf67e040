"""What a built library belongs to. Building is tested with those that are built."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from sglang_hcache.device.compiled import library_dir


@pytest.mark.parametrize("name", ["flags\t\t", "Features\t"], ids=["x86", "ARM"])
def test_processors_that_differ_share_no_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built for what this one can do, and a cache folder may be on a network drive."""
    real_open = builtins.open
    folders = []
    for found in ("one two", "one two three"):

        def fake_open(path: Any, *args: Any, found: str = found, **kwargs: Any) -> Any:
            if path == "/proc/cpuinfo":
                return io.StringIO(f"processor\t: 0\n{name}: {found}\n")
            return real_open(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", fake_open)
        folders.append(library_dir("name", "source", ["-march=native"]))
    assert folders[0] != folders[1]
