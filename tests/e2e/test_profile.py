"""``hcache profile`` on a real server, and who uses what it saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sglang_hcache.cli.server.process import ServerProcessError
from sglang_hcache.core.config import environment_with
from sglang_hcache.plan.profile import Profile, ProfileSource
from tests.e2e.harness import TierServer, random_prompt

HCACHE = str(Path(sys.executable).with_name("hcache"))
USES, MEASURES = "hcache: using the profile", "hcache: measured this machine"


def hcache(cache: Path, *arguments: str) -> str:
    """Standard output of the command, with ``cache`` as the user's cache folder."""
    result = subprocess.run(
        [HCACHE, *arguments],
        env=environment_with({"XDG_CACHE_HOME": str(cache)}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def served_with(folder: Path, model: Path) -> list[str]:
    return [
        *("--model-path", str(model), "--dtype", "float32", "--max-total-tokens", "8192"),
        *(
            "--chunked-prefill-size",
            "512",
            "--hcache-host-size",
            "64MB",
            "--hcache-dirs",
            str(folder / "disk"),
        ),
        *("--hcache-disk-size", "256MB", "--hcache-disk-free-floor", "0"),
    ]


def start(folder: Path, cache: Path, arguments: Sequence[str]) -> str:
    """The log of a server with ``auto``, which must also serve."""
    with TierServer(folder, [*arguments, "--hcache-method", "auto"], cache=cache) as server:
        server.ask(random_prompt(1, 200))
        return server.process.log_text()


def test_a_saved_profile_is_used_and_one_of_another_model_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    # Its longest sequence is shorter than what SGLang would prefill at once.
    model, cache = tiny_model(max_position=320), tmp_path / "cache"
    arguments = served_with(tmp_path, model)
    data = json.loads(hcache(cache, "profile", *arguments, "--seconds", "0.3", "--json"))
    path = Path(data["file"])
    profile = Profile.from_json(path.read_text())
    assert path.parent == cache / "sglang-hcache" / "profiles"
    assert path.name.startswith(model.name)
    assert profile.source is ProfileSource.MEASURED
    assert profile.token_range == (64, 256)
    assert set(data["read_bytes_per_s"]) == set(profile.tiers) == {"host", "disk"}
    assert profile.machine.endswith(str(tmp_path / "disk"))
    assert "costs" in hcache(cache, "plan", "--profile", str(path), "--json")

    log = start(tmp_path / "same", cache, arguments)
    assert f"{USES} {path}" in log
    assert MEASURES not in log
    assert "Load weight" in log

    # That others measure, unit tests show (test_planning.py). One that is named is refused before the model is loaded.
    refused = [*served_with(tmp_path, tiny_model(layers=5)), "--hcache-profile", str(path)]
    with pytest.raises(ServerProcessError):
        start(tmp_path / "refused", cache, refused)
    text = (tmp_path / "refused" / "server.log").read_text()
    (line,) = [line for line in text.splitlines() if "hcache: error: " in line]
    assert f"--hcache-profile: {path} is of the model {model.name}, which has other sizes" in line
    assert "Load weight" not in text


def test_a_server_that_does_not_start_leaves_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result = subprocess.run(
        [HCACHE, "profile", *served_with(tmp_path, tiny_model()), "--pp-size", "2"],
        env=environment_with({"XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("hcache: error: --hierarchical-cache hcache supports --pp-size 1 only")
    assert not list((cache / "sglang-hcache" / "profiles").iterdir())
    assert not list(tmp_path.glob("hcache-profile-*"))
    assert not (tmp_path / "disk").exists()
