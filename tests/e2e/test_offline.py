"""SGLang without a server: ``Engine`` takes the tier with arguments that the command line's parser has made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.cli.server.launch import prepare_launch
from tests.e2e.harness import TOLERANCE


def test_an_engine_restores(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    given = ["--model-path", str(tiny_model()), "--dtype", "float32", "--max-total-tokens", "2048"]
    tier = [
        *("--hcache-method", "hidden", "--hcache-restore", "always"),
        *("--hcache-host-size", "64MB", "--hcache-dirs", str(tmp_path / "disk")),
    ]
    size = ["--hcache-disk-size", "1GB", "--hcache-disk-free-floor", "100MB"]
    command, environment = prepare_launch([*given, *tier, *size])
    program = Path(__file__).with_name("offline_engine.py")
    done = subprocess.run(
        [sys.executable, str(program), *command[command.index("sglang.launch_server") + 1 :]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = found["answers"]
    assert found["chunks_on_disk"] == 4
    assert found["keeps_signals"], "Ctrl-C is the program's own"
    assert (first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]) == (0, 256)
    assert second["meta_info"]["cached_tokens_details"]["host"] == 256
    assert first["output_ids"] == second["output_ids"]
    logprobs = [
        [item[0] for item in answer["meta_info"]["output_token_logprobs"]] for answer in (first, second)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=TOLERANCE)
