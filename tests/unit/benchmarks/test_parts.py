"""The table of docs/benchmarks.md, "Adding one": no part imports a command, and few import other parts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
PARTS = {
    "common": set(),
    "workloads": set(),
    "serving": {"common"},
    "restoring": {"common"},
    "ablation": {"common", "restoring"},
    "storage": {"common"},
    "gpu": {"common", "restoring", "serving"},
}
"""Folder -> folders that it may import, besides itself."""
MAX_FILE_LINES = 400


def imported(path: Path) -> set[str]:
    """First parts of the names of what a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("folder", PARTS)
def test_parts_keep_to_the_table(folder: str) -> None:
    ours = {*PARTS, *COMMANDS} - PARTS[folder] - {folder}
    for path in (ROOT / "benchmarks" / folder).glob("*.py"):
        assert not imported(path) & ours, path.name


def test_no_command_imports_another() -> None:
    for name in COMMANDS:
        assert not imported(ROOT / "benchmarks" / f"{name}.py") & set(COMMANDS), name


def test_the_table_is_complete_and_that_of_the_documentation() -> None:
    folders = {path.parent.name for path in (ROOT / "benchmarks").glob("*/*.py")}
    assert folders == PARTS.keys()
    text = (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", text, flags=re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows} == PARTS
    for name in COMMANDS:
        assert f"`{name}.py`" in text


def test_files_stay_short() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, path.name
