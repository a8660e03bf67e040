"""Kernels that are compiled without a GPU: that SGLang has them under these names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def test_all_of_them_are_there(bench: Callable[[str], Any]) -> None:
    command, serving = bench("gpu.compile_kernels"), bench("gpu.serving")
    wanted = command.kernels()
    assert len(set(map(str, wanted))) == len(wanted)
    assert {str(kernel) for kernel in wanted} >= {
        "norm.gen_norm_module",
        "kvcache._jit_kvcache_module(10240, 10240)",
        "kvcache._jit_kvcache_module(2048, 2048)",
    }
    assert serving.ON_GPU.hidden == command.SERVER_WIDTH
    assert serving.ZIPF[serving.ZIPF.index("--hidden") + 1] == str(command.ZIPF_WIDTH)
    for kernel in wanted:
        compiler = kernel.compiler()
        inspect.signature(compiler.func).bind(*compiler.args, **compiler.keywords)


def test_without_a_compiler_it_says_so(
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench("gpu.compile_kernels").main(["--out", str(tmp_path / "out")]) == 2
    assert "nvcc is not on the PATH" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
