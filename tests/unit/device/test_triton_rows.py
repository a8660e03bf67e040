"""The GPU's kernel without a GPU: what it computes, in Triton's interpreter; and that it compiles for one.

That it runs on one is shown by ``benchmarks/gpu/run.py`` (``docs/gpu-development.md``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILES = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_hcache.device.triton_kernels import finish_rows
from sglang_hcache.device.triton_rows import constants_of
from sglang_hcache.device.key_steps import KeyNorm, KeySteps, Rotation

CASES = {  # heads, head_dim, rotary_dim, halves, rounds products, norm's size, type of the table
    "llama-2-7b": (32, 128, 128, True, False, 0, "fp32"),
    "qwen3-8b": (8, 128, 128, True, False, 128, "fp32"),
    "olmo-2-7b": (32, 128, 128, True, False, 4096, "fp32"),
    "gemma-7b": (16, 256, 256, True, False, 0, "fp32"),
    "phi-2": (32, 80, 32, True, True, 0, "bf16"),
    "opt-30b": (56, 128, 0, True, False, 0, "bf16"),
    "pairs of neighbours": (8, 128, 64, False, False, 0, "fp32"),
}
names = finish_rows.arg_names
for case, (heads, head_dim, dim, halves, rounds, norm, table) in CASES.items():
    rotation = Rotation(torch.empty(1, dim), halves, rounds) if dim else None
    steps = KeySteps(KeyNorm(torch.empty(norm), 1e-6, False) if norm else None, rotation)
    constants = constants_of(steps, heads, head_dim)
    warps, fuses = constants.pop("num_warps"), constants.pop("enable_fp_fusion")
    pointers = dict.fromkeys(("key", "value", "weight", "key_pool", "value_pool"), "*bf16")
    pointers |= {"table": "*" + table, "positions": "*i64", "slots": "*i64"}
    numbers = {"key_stride": "i32", "value_stride": "i32", "num_positions": "i32", "epsilon": "fp32"}
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    known = (*(pointers.keys() - {"positions", "slots"}), "key_stride", "value_stride")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in known}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(finish_rows, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": fuses},
    )
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert ".local" not in ptx, f"{case}: spills"
    wide = ptx.count("ld.global.v4") and ptx.count("st.global.v4")
    assert wide or case == "pairs of neighbours", f"{case}: no 16-byte access"
    print("compiled", case)

from sglang_hcache.device.triton_kernels import gather_rows, scatter_rows
from sglang_hcache.device.triton_layers import constants_of

for kernel, rows, number in ((gather_rows, "out", "num_rows"), (scatter_rows, "rows", "first")):
    names = kernel.arg_names
    constants = constants_of(5120)
    warps = constants.pop("num_warps")
    signature = {"keys": "*i64", "values": "*i64", "slots": "*i64", rows: "*bf16", number: "i32"}
    compiled = triton.compile(
        ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"),
                  {(names.index(name),): value for name, value in constants.items()},
                  {(names.index(rows),): [["tt.divisibility", 16]]}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and ".local" not in ptx
    assert ptx.count("ld.global.v4") and ptx.count("st.global.v4"), "no 16-byte access"
"""


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_the_interpreter() -> None:
    """All of ``interpreted/``: see there."""
    result = _run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted"), TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def test_it_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    """What finishes rows, and what reads and writes the pool. Nothing in memory of its own, and 16 bytes at a time.

    Triton brings NVIDIA's assembler along.
    """
    result = _run("-c", COMPILES, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("compiled") == COMPILES.count('": (')


def test_collected_alone_they_say_nothing() -> None:
    """Without the interpreter the kernel's tests would want a GPU."""
    result = _run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted"), TRITON_INTERPRET="0"
    )
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
