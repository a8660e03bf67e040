"""What ``tests/conftest.py`` does for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import sglang_hcache
from tests.conftest import WholeFiles


def test_what_tests_start_is_the_checkout_that_they_lie_in(tmp_path: Path) -> None:
    program = "import sglang_hcache; print(sglang_hcache.__file__)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.strip() == sglang_hcache.__file__


def test_a_test_that_ended_its_worker_is_not_run_again() -> None:
    node: Any = object()
    scheduler = WholeFiles.__new__(WholeFiles)
    scheduler.workqueue = {}
    scheduler.assigned_work = {node: {"file": {"before": True, "hangs": False, "behind": False}}}
    assert scheduler.remove_node(node) == "hangs"
    assert scheduler.workqueue == {"file": {"before": True, "hangs": True, "behind": False}}


def test_a_worker_that_has_done_everything_leaves_nothing() -> None:
    node: Any = object()
    scheduler = WholeFiles.__new__(WholeFiles)
    scheduler.workqueue = {}
    scheduler.assigned_work = {node: {"file": {"one": True}}}
    assert scheduler.remove_node(node) is None
    assert not scheduler.workqueue
