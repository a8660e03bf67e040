"""Compile the SGLang kernels that the servers of ``run.py`` use, for an H100 or H200, on a machine with nvcc.

python benchmarks/gpu/compile_kernels.py --out DIR
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, its parts are found beside its folder

import torch

from gpu.shapes import SHAPES

_OPS = "sglang.kernels.ops"
_CACHE = Path(".cache", "tvm-ffi")
_FLASHINFER = Path("flashinfer-aot")
_BYTES = 2  # of a value, bfloat16 or float16
SERVER_WIDTH = 1024
"""Values of K of a token, in the servers of the parts ``server`` and ``disk``, ..."""
ZIPF_WIDTH = 4096
"""... and in those of ``zipf``."""


@dataclass(frozen=True)
class Kernel:
    """A function that compiles, or that says how."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}{self.arguments or ''}"

    @property
    def is_flashinfers(self) -> bool:
        return self.module.startswith("flashinfer")

    def compiler(self) -> Callable[[], Any]:
        return partial(
            getattr(importlib.import_module(self.module), self.function), *self.arguments, **self.named
        )


def kernels() -> list[Kernel]:
    """All of them, those that take long first."""
    half, brain = torch.float16, torch.bfloat16
    rows = {_BYTES * width for width in (*(shape.width for shape in SHAPES), SERVER_WIDTH, ZIPF_WIDTH)}
    heads = {(shape.head_dim, brain) for shape in SHAPES if shape.rotates} | {(64, half), (128, half)}
    moved = {"element_size": _BYTES * ZIPF_WIDTH, "unroll": 1, "block_quota": 2}
    return [
        Kernel("flashinfer.norm", "gen_norm_module"),
        *(
            Kernel(f"{_OPS}.kvcache.hicache", f"_jit_{kind}_module", named=moved)
            for kind in ("hicache", "hicache_staged")
        ),
        Kernel(f"{_OPS}.layernorm.norm", "_jit_qknorm_module", (128, brain)),
        *(
            Kernel(f"{_OPS}.attention.rope", "_jit_fused_rope_module", (True, size, dtype, dtype))
            for size, dtype in sorted(heads, key=str)
        ),
        *(Kernel(f"{_OPS}.activation.activation", "activation_module", (dtype,)) for dtype in (half, brain)),
        *(Kernel(f"{_OPS}.kvcache.kvcache", "_jit_kvcache_module", (size, size)) for size in sorted(rows)),
        *(
            Kernel(f"{_OPS}.attention.clamp_position", "_jit_clamp_position_module", (dtype,))
            for dtype in (torch.int64, torch.int32)
        ),
    ]


def compile_one(kernel: Kernel, out: Path) -> str | None:
    """Into ``out``; what went wrong, or None. In a process of its own, whose environment it changes."""
    os.environ |= {
        "TVM_FFI_CACHE_DIR": str(out / _CACHE),
        "FLASHINFER_WORKSPACE_BASE": str(out),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
    }
    import flashinfer  # noqa: F401 (before the architecture is asked for)
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    began = time.monotonic()
    try:
        with override_jit_cuda_arch(9, 0):
            found = kernel.compiler()()
            if kernel.is_flashinfers:
                found.build(verbose=False)
                made = Path(found.get_library_path())
                into = out / _FLASHINFER / made.stem / made.name
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, into)
    except Exception as error:  # whatever compilers say
        return f"{type(error).__name__}: {error}"
    print(f"{kernel}: {time.monotonic() - began:.0f} s", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all were compiled, 1 some were not, 2 there is no nvcc."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Takes a few minutes and needs no GPU. Copy DIR/{_CACHE} into the home folder on the GPU machine, and "
        f"the contents of DIR/{_FLASHINFER} into data/aot of its flashinfer package.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the kernels; existing files are kept",
    )
    parser.add_argument("--jobs", type=int, default=2, help="concurrent compilers. Default: %(default)s")
    options = parser.parse_args(arguments)
    if shutil.which("nvcc") is None:
        print(
            "nvcc is not on the PATH: install the CUDA compiler of the version that torch uses",
            file=sys.stderr,
        )
        return 2
    wanted = kernels()
    failed = 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(compile_one, kernel, options.out.absolute()): kernel for kernel in wanted}
        for future in as_completed(pending):
            try:
                error = future.result()
            except BrokenProcessPool:
                error = "its process was ended, perhaps because memory ran out: try --jobs 1"
            if error is not None:
                failed += 1
                print(f"{pending[future]}: {error}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
