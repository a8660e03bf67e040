"""Options for all tests, and what a worker takes at a time."""

from __future__ import annotations

import faulthandler
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import sglang_hcache

_ROOT = Path(__file__).parents[1]
_USUAL = {"kills": 20, "flips": 15, "exact_times": False}
"""With these options as they are, no test takes long."""

_OF_TERMINALS = (
    *("LINES", "TERMINAL_WIDTH", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"),
    "GITHUB_ACTIONS",  # for Typer that is a terminal with colours
)
"""Variables that say how wide and colourful output may be, of whatever runs the tests."""


class WholeFiles(LoadFileScheduling):  # type: ignore[misc]
    """Workers take whole files, and ``one_server/`` as if it were one: a server for each worker is one too many."""

    def _split_scope(self, nodeid: str) -> str:
        before, folder, _ = nodeid.partition("/one_server/")
        return before + folder if folder else str(super()._split_scope(nodeid))

    def remove_node(self, node: Any) -> str | None:
        """A test that ended its worker is not run again, as xdist would: it would end the next one too."""
        files = self.assigned_work.get(node, {}).values()
        left = [(file, test) for file in files for test, is_done in file.items() if not is_done]
        if left:
            file, test = left[0]
            file[test] = True
        super().remove_node(node)
        return left[0][1] if left else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return WholeFiles(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure() -> None:
    """A busy machine is no error of what hypothesis tests.

    And nobody looks for garbage before all tests are imported, SGLang with them: that would take a third of the time.
    """
    _test_this_checkout()
    _forget_the_terminal()
    settings.register_profile("untimed", settings(deadline=None))
    settings.load_profile("untimed")
    gc.disable()


def _test_this_checkout() -> None:
    """Not the one that is installed, which may be another; nor in what tests start."""
    found = Path(sglang_hcache.__file__)
    if _ROOT not in found.parents:
        raise pytest.UsageError(f"these are tests of {_ROOT}, but sglang_hcache comes from {found.parent}")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if paths[0] != str(_ROOT):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, paths)])


def _forget_the_terminal() -> None:
    """Output is as wide and as plain for all who run the tests. Typer looks only when it is imported."""
    os.environ["COLUMNS"] = "80"
    for name in _OF_TERMINALS:
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In a long run a test takes as long as it takes: see ``faulthandler_timeout`` in ``pyproject.toml``."""
    if any(item.config.getoption(name) != usual for name, usual in _USUAL.items()):
        faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sglang-hcache")
    group.addoption(
        "--kills",
        type=int,
        default=_USUAL["kills"],
        metavar="N",
        help=f"tests/faults: kill a store's process N times ({_USUAL['kills']})",
    )
    group.addoption(
        "--flips",
        type=int,
        default=_USUAL["flips"],
        metavar="N",
        help=f"tests/faults: damage each kind of file N times ({_USUAL['flips']})",
    )
    group.addoption(
        "--fault-seed",
        type=int,
        metavar="N",
        help="what is drawn in tests/faults (0) and by --random-servers (one of a few by the commit)",
    )
    group.addoption(
        "--random-servers",
        type=int,
        default=1,
        metavar="N",
        help="tests/e2e: serve with N random settings (1); --fault-seed draws others",
    )
    group.addoption(
        "--exact-times",
        action="store_true",
        help="tests/e2e: hold measured times to what is promised; needs a machine that does nothing else",
    )
    group.addoption(
        "--write-families", action="store_true", help="tests/e2e: write what was seen into docs/families.md"
    )
    group.addoption(
        "--write-reference",
        action="store_true",
        help="tests/unit/cli: write docs/commands.md and the tables of docs/flags.md and docs/metrics.md",
    )
    group.addoption(
        "--screenshots",
        type=Path,
        metavar="DIR",
        help="tests/e2e: put screenshots and the picture of the dashboard here",
    )
