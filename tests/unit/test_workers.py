"""What the tests' workers are given (``tests/conftest.py``)."""

from __future__ import annotations

from typing import Any

from tests.conftest import WholeFiles


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
