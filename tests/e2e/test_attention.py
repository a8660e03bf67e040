"""Every family's attention, without a server: its real model is loaded, run, restored and compared in the KV pool.

One process checks all families (``family_check.py``). What it sees is also the table in ``docs/families.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.cli.server.launch import prepare_launch
from sglang_hcache.cli.tiny_model.model import FAMILIES
from tests.e2e.family_table import BEHIND, TABLE, render, stable, written

ROOT = Path(__file__).parents[2]
NOT_DESCRIBED = {"gpt2"}
"""Families for which nobody wrote down what their attention does."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    log = tmp_path_factory.mktemp("families") / "log"
    models = [f"{name}={tiny_model(family=name, layers=3, **_sizes(name))}" for name in FAMILIES]
    _, environment = prepare_launch([])
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    with log.open("w") as errors:
        process = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "family_check.py"), "float32", *models],
            env=environment | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=600,
            check=False,
        )
    found = [
        json.loads(line[len("RESULT ") :])
        for line in process.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    assert [each["family"] for each in found] == list(FAMILIES), log.read_text()[-4000:]
    return {each["family"]: each for each in found}


def _sizes(name: str) -> dict[str, int]:
    return {"kv_heads": 2} if FAMILIES[name].shares_kv_heads else {}


def seen(results: Results, family: str) -> dict[str, Any]:
    assert "failed" not in results[family], results[family]["failed"]
    return results[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_finds_a_projector(results: Results, family: str) -> None:
    found = seen(results, family)
    assert found["why_not_hidden"] is None
    assert found["projector"] == ("generic" if family in NOT_DESCRIBED else "described")
    assert set(found["self_check"]) == {"hidden", "kv"}
    assert all(error <= found["tolerance"] for error in found["self_check"].values())
    assert found["self_check"]["kv"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_comes_back_by_every_projector(results: Results, family: str) -> None:
    """Also by the generic one, which knows nothing of the family."""
    found = seen(results, family)
    expected = {"generic"} | ({"described"} if family not in NOT_DESCRIBED else set())
    assert set(found["restored"]) == expected
    for name, error in found["restored"].items():
        assert isinstance(error, float), f"{name}: {error}"
        assert error <= found["tolerance"], name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_for_a_gpu_writes_what_the_modules_do(results: Results, family: str) -> None:
    """In Triton's interpreter. Norms sum in another order; all else has the same bits."""
    fused = seen(results, family)["fused"]
    if family in NOT_DESCRIBED:
        assert fused is None
        return
    assert fused["layers"] == 3
    assert fused["norms"] == (3 if family in ("qwen3", "olmo2") else 0)
    assert fused["error"] <= (4e-7 if fused["norms"] else 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_restored_prefix_is_what_follows_the_computed_one(
    results: Results, family: str
) -> None:
    found = seen(results, family)
    assert set(found["continued"]) == {"hidden", "kv", "recompute"}
    for method, error in found["continued"].items():
        assert error <= BEHIND, method


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_takes_no_wrong_projector(results: Results, family: str) -> None:
    found = seen(results, family)
    mutants = dict(found["mutants"])
    if family in ("opt", "gpt2"):  # positions are in the hidden states: a projector cannot get them wrong
        assert {mutants.pop(name) for name in list(mutants) if name.startswith("wrong position")} == {None}
    else:
        assert {"wrong position (generic)", "wrong position far away (generic)"} <= mutants.keys()
    assert {
        f"{each} (generic)" for each in ("K too large", "K of the pass", "K of a short pass")
    } <= mutants.keys()
    assert "heads in another order" in mutants or family in NOT_DESCRIBED
    assert "wrong rotary base" in mutants or family in {"opt", *NOT_DESCRIBED}
    if family in ("qwen1.5", "qwen2", "qwen2_moe", "opt", "phi", "stablelm"):
        assert "missing bias" in mutants
    if family in ("qwen3", "olmo2"):
        assert "missing norm" in mutants
    assert "missing clip" in mutants or family != "olmo"
    assert all(mutants.values()), mutants
    refused = (
        f"refuses to serve {found['architecture']} with the method hidden: K or V differ from the model's own"
    )
    assert refused in mutants["K too large (generic)"]
    assert "(allowed: " in mutants["K too large (generic)"]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_right_projector_there_are_k_and_v(results: Results, family: str) -> None:
    assert "K or V differ from the model's own by 0.00" in seen(results, family)["without_projector"]


def test_the_table_in_the_docs_is_what_was_seen(results: Results, pytestconfig: pytest.Config) -> None:
    """Its columns that do not depend on the machine; ``--write-families`` writes it."""
    rows = [render(seen(results, family)) for family in FAMILIES]
    if pytestconfig.getoption("--write-families"):
        TABLE.write_text(written(TABLE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    assert stable(TABLE.read_text(encoding="utf-8")) == [row[:-1] for row in rows]
