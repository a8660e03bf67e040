"""The benchmarks' modules, imported as their commands import them: with benchmarks/ first on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], Any]]:
    """Imports a module by its name there, such as ``bench("serving.comparison")``. None stays imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if BENCHMARKS in Path(getattr(module, "__file__", None) or "").parents:
            del sys.modules[name]
