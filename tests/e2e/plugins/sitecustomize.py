"""Python imports this in what the end-to-end tests start, before anything else.

Importing SGLang's seven thousand modules takes a core 12 s. With Python's own threshold, a seventh of that time goes
into looking for garbage where there is none, and a quarter into libraries that are imported because they are there, for
what hardly a test uses: assisted generation, torchao's quantisation, FlashInfer's kernels for GPUs. And each of a
server's three processes does it, for SGLang starts them anew ("spawn", which CUDA needs): forked, two have everything.
"""

import gc
import multiprocessing
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

UNUSED = {"sklearn", "torchao", "flashinfer", "scipy", "torchaudio"}
if "HCACHE_TEST_TORCHAO" in os.environ:
    UNUSED.remove("torchao")


class _WithoutUnused(PathFinder):
    """Finds no library of ``UNUSED``, also where somebody only asks whether it is there."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname in UNUSED else super().find_spec(fullname, path, target)


gc.set_threshold(100_000)
sys.meta_path[sys.meta_path.index(PathFinder)] = _WithoutUnused
if "HCACHE_TEST_FORK" in os.environ:
    multiprocessing.set_start_method = lambda *_, **__: None
