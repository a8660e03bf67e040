"""``hcache demo`` as a user runs it, small."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from sglang_hcache.cli.server.pair import LOGPROB_TOLERANCE
from sglang_hcache.core.config import environment_with

HCACHE = Path(sys.executable).parent / "hcache"


def left_in(folder: Path) -> list[Path]:
    """All but torch's cache, which is one for all runs of a user."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def test_demo_compares_all_answers_and_cleans_up(tmp_path: Path) -> None:
    temporary, store = tmp_path / "tmp", tmp_path / "store"
    temporary.mkdir()
    # The plugin gives restores time, on a machine that is busy with something else
    switches = tmp_path / "switches"
    switches.mkdir()
    (switches / "always_restore").touch()
    command = [str(HCACHE), "demo", "--json", "--conversations", "3", "--turns", "2", "--keep", str(store)]
    result = subprocess.run(
        command,
        env=environment_with({"TMPDIR": str(temporary), "HCACHE_TEST_SWITCHES": str(switches)}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)

    assert len(report["turns"]) == report["summary"]["requests"] == 6
    assert report["summary"]["unequal"] == 0
    assert report["summary"]["largest_difference"] <= LOGPROB_TOLERANCE
    assert all(turn["equal"] for turn in report["turns"])
    first = [turn for turn in report["turns"] if turn["turn"] == 1]
    returning = [turn for turn in report["turns"] if turn["turn"] == 2]
    assert all(turn["host_tokens"] + turn["disk_tokens"] == 0 for turn in first)
    for turn in returning:
        # What the tier saved is recomputed by the other server, all but a few tokens that all prompts share.
        assert turn["host_tokens"] + turn["disk_tokens"] > turn["prompt_tokens"] / 2
        assert turn["device_tokens_without_tier"] < 64
    assert report["summary"]["host_tokens"] > 0
    assert report["summary"]["disk_tokens"] > 0
    assert report["disk_bytes"] > 0
    assert any((store / "tier").iterdir())
    assert left_in(temporary) == []


def test_ctrl_c_twice_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = environment_with({"TMPDIR": str(tmp_path)})
    del environment["HCACHE_TEST_FORK"]  # the plain way, as a user's
    demo = subprocess.Popen(
        [str(HCACHE), "demo", "--json"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script inherits "ignore", and Python then never raises KeyboardInterrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert demo.stderr is not None
        while "Starting two servers" not in (line := demo.stderr.readline()):
            assert line, "the demo ended early"
        deadline = time.monotonic() + 120
        while len(servers := psutil.Process(demo.pid).children(recursive=True)) < 2:
            assert time.monotonic() < deadline, "no servers were started"
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        time.sleep(0.1)
        demo.send_signal(signal.SIGINT)  # while the first server is being killed
        assert demo.wait(120) != 0
    finally:
        demo.kill()
        demo.wait()
    _, alive = psutil.wait_procs(servers, timeout=120)
    assert not alive
    assert left_in(tmp_path) == []
