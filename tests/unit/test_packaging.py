"""What is committed can be set up anywhere: locked by hash, and without a trace of the machine it was made on."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.sglang_plugin.seam.release import SGLANG

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# In two parts each, so that this file does not hold what it forbids.
FORBIDDEN = [
    *("pypi" + ".org", "files.python" + "hosted", "download.py" + "torch.org", "pypi.nv" + "idia.com"),
    *("/op" + "t/wheels", "/op" + "t/pypi", "--extra-" + "index-url", "/work/" + "main", "file:" + "///"),
]


def _committed_files() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in result.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _pins() -> dict[str, list[str]]:
    """Distribution -> its ``name==version`` lines and hashes."""
    pins: dict[str, list[str]] = {}
    for line in LOCK.read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            current = pins.setdefault(match.group(1), [])
            current.append(line)
        elif line.lstrip().startswith("--hash"):
            current.append(line.strip())
    return pins


def test_no_committed_file_names_an_index_or_this_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in _committed_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for text in FORBIDDEN
        if text in line
    ]
    assert not found, "\n".join(found)


def test_no_uv_lock():
    assert "uv.lock" not in {path.name for path in _committed_files()}


def test_lock_holds_pins_hashes_and_comments_only():
    line = re.compile(r"[A-Za-z0-9._-]+==\S+( ; .+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|    #.*")
    wrong = [text for text in LOCK.read_text().splitlines() if not line.fullmatch(text)]
    assert not wrong
    assert "://" not in LOCK.read_text()


@pytest.mark.parametrize(("name", "version"), [("sglang", "0.5.17"), ("torch", "2.11.0")])
def test_lock_pins(name, version):
    lines = _pins()[name]
    assert lines[0].startswith(f"{name}=={version} ")
    assert any("--hash" in line for line in lines)
    assert f"{name}=={version}" in PROJECT["project"]["dependencies"]


def test_the_pinned_sglang_is_the_one_that_the_plugin_is_written_for():
    assert f"sglang=={SGLANG}" in PROJECT["project"]["dependencies"]
    compat = ROOT / "sglang_hcache" / "sglang_plugin" / "compat"
    assert [path.parent.name for path in compat.glob("*/__init__.py")] == [f"v{SGLANG.replace('.', '_')}"]


def test_lock_covers_everything_asked_for():
    asked = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["build-system"]["requires"],
    ]
    names = {re.split(r"[<>=\[; ]", requirement)[0].lower() for requirement in asked}
    assert names <= _pins().keys()


@pytest.mark.parametrize(
    "table",
    [PROJECT["project"]["scripts"], PROJECT["project"]["entry-points"]["sglang.srt.plugins"]],
    ids=["command", "plugin"],
)
def test_entry_point_exists(table):
    module_name, _, function = table["hcache"].partition(":")
    path = ROOT / (module_name.replace(".", "/") + ".py")
    assert f"def {function}(" in path.read_text()


def test_command_is_importable():
    assert callable(importlib.import_module("sglang_hcache.cli.entry").main)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_example_configuration_is_valid(path):
    settings = yaml.safe_load(path.read_text())
    config = HCacheConfig.from_settings(settings)
    # What the file says is what holds: no value was corrected behind the reader's back.
    assert config.segment_bytes * 4 <= config.disk_size


def test_licence_is_apache():
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[1]
