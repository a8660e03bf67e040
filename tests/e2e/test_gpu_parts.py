"""Parts of ``benchmarks/gpu`` on a CPU, with small sizes: that they run, and what they show besides speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_hcache.cli.server.launch import prepare_launch

ROOT = Path(__file__).parents[2]
SERVER = """
import json
from gpu import serving

sizes = serving.Sizes(
    layers=3, hidden=128, histories=6, length=320, pool_histories=3, requests=40, answer=4, decoded=150
)
serving.measure_server(lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True), sizes=sizes)
"""
DISK = """
import json
from gpu import serving

sizes = serving.Sizes(
    layers=3, hidden=128, histories=16, length=320, pool_histories=3, requests=1, answer=4, decoded=16
)
serving.measure_disk(lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True), sizes=sizes)
"""
SMALL = """
small = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}
small |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
"""
MODEL = """
import dataclasses, json, torch
from gpu import models
from gpu.shapes import shape_named

torch.set_num_threads(1)
models._ARGUMENTS = ("--load-format", "dummy", "--dtype", "bfloat16")
models.TOKENS, models.PIECE, models.ROUNDS = 256, 128, 2
shape = shape_named("llama-2-7b")
shape = dataclasses.replace(shape, config=shape.config | small)
models.measure(shape, lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True))
"""
OVERHEAD = """
import dataclasses, json, pathlib, tempfile
from gpu import serving
from gpu.shapes import shape_named

shape = shape_named("llama-2-13b")
shape = dataclasses.replace(shape, config=shape.config | small)
sizes = ("--prompt", "128", "--histories", "512", "--long-history", "512", "--batches", "1,2", "--rounds", "1")
sizes += ("--warm-up", "0", "--decoded", "128", "--chunks", "1000", "--host-size", "256MB")
tell = lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True)
with tempfile.TemporaryDirectory() as folder:
    logs = pathlib.Path(folder)
    serving.measure_overhead(tell, logs, shape, sizes)
    tell("logs", {log.stem: log.read_text() for log in logs.iterdir()})
"""


DEFAULTS = """
import dataclasses, json, pathlib, tempfile
from gpu import defaults
from gpu.shapes import shape_named

shape = shape_named("llama-2-7b")
shape = dataclasses.replace(shape, config=shape.config | small)
sizes = defaults.Sizes(lengths=(512, 640), prompt=256, host_size="256MB")
tell = lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True)
with tempfile.TemporaryDirectory() as folder:
    defaults.measure(tell, pathlib.Path(folder), shape, sizes)
"""


def results_of(program: str, **more: str) -> dict[str, dict[str, Any]]:
    """What a part tells.

    Args:
        more: environment variables.
    """
    _, environment = prepare_launch([])
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)} | more,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(json.loads(line[len("RESULT ") :]) for line in lines)


def test_the_part_of_a_server() -> None:
    found = results_of(SERVER)
    assert set(found) == {
        "what was decoded comes back",
        "short prompts come back",
        "restored equals computed",
        "40 requests at once",
    }
    assert all(each["ok"] for each in found.values()), found
    assert found["what was decoded comes back"]["restored_tokens"] >= 4 * 64
    assert found["restored equals computed"]["different_answers"] > 1, "else they would equal anything"
    assert found["40 requests at once"]["restored_tokens"] > 0


def test_the_part_of_a_disk() -> None:
    found = results_of(DISK)
    assert set(found) == {"from host memory and disk", "from disk, after a restart"}
    assert all(each["ok"] for each in found.values()), found
    assert found["from host memory and disk"]["host_hit_ratio"] > 0
    assert found["from disk, after a restart"]["host_hit_ratio"] == 0
    assert found["from disk, after a restart"]["restored_requests"] == 16


def test_the_part_of_a_model() -> None:
    found = results_of(SMALL + MODEL)
    assert set(found) == {"self-check", "hidden", "kv"}
    assert all(each["ok"] for each in found.values()), found
    assert found["self-check"]["mutants_taken"] == []
    assert found["hidden"]["recompute_milliseconds"] > 0


def test_the_part_of_overhead() -> None:
    """A model without weights."""
    found = results_of(SMALL + OVERHEAD)
    logs = found.pop("logs")
    assert logs.keys() == {"off", "tier"}
    assert all("--load-format dummy" in log for log in logs.values())
    assert found["512 tokens return, 64 are new: TTFT"]["restored_tokens"] == 512
    assert found["decoding, 2 at once: TBT"]["ratio"] > 0
    beside = found["TBT p50 while 512 tokens return, over TBT alone"]
    assert beside["restored_tokens"] >= 512 - 64
    lacking = {what: each for what, each in found.items() if not each["ok"]}
    # Of one round each: where this process waits for a core, tokens come all at once, and nobody decodes meanwhile.
    assert all("TBT" in what and each["not_measured"] for what, each in lacking.items()), lacking


def test_the_part_of_the_defaults(tmp_path: Path) -> None:
    """Whether so small a model is restored depends on the machine; whether that is late must not."""
    found = results_of(SMALL + DEFAULTS, HCACHE_TEST_SWITCHES=str(tmp_path))
    assert set(found) == {"computed", "they return to an idle server", "they return beside prefills"}
    for each in list(found.values())[1:]:
        assert each["done"] + each["declined_slower"] >= 1
        assert not each["late"] + each["failed"] + each["errors"]
        assert (each["restored_tokens"] > 0) is (each["done"] > 0)
