"""Segment files that cannot be opened, or not for writing, in a directory that is well otherwise."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.store import DiskStore, aligned_empty
from sglang_hcache.testing.stored_chunks import make_keys, read_keys, small_config, write_keys
from tests.unit.store.conftest import conditions

LAYERS = (4096,) * 6
OLD, NEW = make_keys(0, 3), make_keys(10, 3)


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, number: int, *, writing: bool) -> None:
    """``path`` cannot be opened, or, with ``writing``, not for that."""
    real = os.open

    def open_(name: Any, flags: int, *more: Any, **others: Any) -> int:
        if name == path and (flags & os.O_RDWR or not writing):
            raise OSError(number, os.strerror(number), str(path))
        return real(name, flags, *more, **others)

    monkeypatch.setattr(os, "open", open_)


def test_a_file_that_takes_no_writes_is_served(
    tmp_path: Path, open_store: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ``chattr +i``."""
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    store.close()
    refuse(monkeypatch, next(config.dirs[1].glob("segment-*")), errno.EPERM, writing=True)
    store = open_store(config)
    for _ in range(4):
        read_keys(store, OLD)
    write_keys(store, NEW, LAYERS)
    read_keys(store, NEW)
    assert conditions(store) == ["healthy", "healthy"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EIO])
def test_a_file_that_cannot_be_opened_is_one_failure_of_a_read(
    tmp_path: Path,
    open_store: Callable[..., DiskStore],
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    config = small_config(tmp_path, 2)
    store = open_store(config)
    write_keys(store, OLD, LAYERS)
    refuse(monkeypatch, next(config.dirs[1].glob("segment-*")), number, writing=False)
    with store.lease(OLD) as lease:
        into = {layer: aligned_empty(3 * size) for layer, size in enumerate(LAYERS)}
        with pytest.raises(StoreIOError, match=os.strerror(number)):
            store.read_layers(lease, into)
    assert counters["store.io_errors"] == 1
    assert conditions(store) == ["healthy", "healthy"]
