"""A model's part of ``benchmarks/gpu`` on a CPU, with a model of the same make and small sizes: that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sglang_hcache.cli.serve import prepare_launch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dataclasses, json, torch
from gpu import models
from gpu.shapes import shape_named

torch.set_num_threads(1)
models._ARGUMENTS = ("--load-format", "dummy", "--dtype", "float32")
models.TOKENS, models.PIECE, models.ROUNDS = 256, 128, 2
shape = shape_named("llama-2-7b")
small = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 1024, "torch_dtype": "float32"}
small |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
shape = dataclasses.replace(shape, config=shape.config | small)
models.measure(shape, lambda name, found: print("RESULT " + json.dumps([name, found]), flush=True))
"""


def test_the_part_of_a_model_runs() -> None:
    _, environment = prepare_launch([])
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    found = dict(json.loads(line[len("RESULT ") :]) for line in lines)
    assert result.returncode == 0, result.stderr[-4000:]
    assert set(found) == {"self-check", "hidden", "kv"}
    assert all(each["ok"] for each in found.values()), found
    assert found["self-check"]["mutants_taken"] == []
    assert found["hidden"]["recompute_milliseconds"] > 0
