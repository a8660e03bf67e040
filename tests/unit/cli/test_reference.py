"""The pages that are made from the code say what the code says; ``--write-reference`` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.cli import get_docs_for_click
from typer.testing import CliRunner

from sglang_hcache.cli import flags, metrics
from sglang_hcache.cli.main import app
from sglang_hcache.core.config import FILE_ONLY_FIELDS, HCacheConfig

DOCS = Path(__file__).parents[3] / "docs"
MARKED = re.compile(r"(?<=<!-- from the code: begin -->\n\n).*(?=\n\n<!-- end -->)", re.DOTALL)


def commands() -> str:
    """The page of all commands, as typer writes it: with whole sentences in lists, without ``--help`` everywhere."""
    command = typer.main.get_command(app)
    give_whole_short_help(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="hcache")
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*Options\*\*:\n\n+(?=\*\*|#|\Z)", "", text)
    return f"{text.strip()}\n".replace("# `hcache`\n", "# Commands\n", 1)


def give_whole_short_help(command: Any) -> None:
    """Instead of what fits into 45 columns."""
    for each in getattr(command, "commands", {}).values():
        each.short_help = " ".join((each.help or "").partition("\n\n")[0].split())
        give_whole_short_help(each)


@pytest.mark.parametrize(
    ("page", "made"),
    [("commands.md", commands), ("flags.md", flags.markdown), ("metrics.md", metrics.markdown)],
)
def test_pages_say_what_the_code_says(
    page: str, made: Callable[[], str], pytestconfig: pytest.Config
) -> None:
    path, text = DOCS / page, made()
    written = path.read_text() if path.exists() else text
    expected = MARKED.sub(lambda _: text, written) if MARKED.search(written) else text
    if pytestconfig.getoption("--write-reference"):
        path.write_text(expected)
    assert path.read_text() == expected


def test_flags_has_every_setting() -> None:
    found = {item["name"]: item for item in json.loads(CliRunner().invoke(app, ["flags", "--json"]).stdout)}
    assert {name for name, item in found.items() if item["in_file"]} == set(HCacheConfig.model_fields)
    others = {item["flag"] for item in found.values() if not item["in_file"]}
    assert others == {"--hierarchical-cache", "--hcache-config", "--hcache-cpu-fixes"}
    assert found["hierarchical_cache"]["allowed"] == ["off", "hcache"]
    assert {name for name, item in found.items() if item["flag"] is None} == FILE_ONLY_FIELDS
    assert found["segment_size"]["default"] == (
        "1/8 of disk_size, at most 256 MiB; for a disk_size above 256 GiB, 1/1,024 of it, at most 32 GiB"
    )
    assert found["disk_write_budget"]["default"] == "none"
    assert found["method"]["allowed"] == ["auto", "hidden", "kv", "hybrid", "recompute"]


@pytest.mark.parametrize("command", [["flags"], ["serve", "--help"]])
def test_names_of_flags_are_whole_in_a_narrow_window(command: list[str]) -> None:
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "60"}).stdout
    for field in HCacheConfig.model_fields.keys() - FILE_ONLY_FIELDS:
        assert f"{flags.flag_of(field)} " in shown
    assert "--hierarchical-cache " in shown
    assert "--hcache-config " in shown
    assert "--hcache-cpu-fixes " in shown
