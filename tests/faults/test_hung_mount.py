"""A disk that answers nothing at all, from before the start on: a FUSE file system that nobody serves."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_hcache.core.config import HCacheConfig
from sglang_hcache.core.errors import StoreIOError
from sglang_hcache.core.observer import Counters
from sglang_hcache.sglang_plugin.launch import tier_arguments
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.setup.disk_at_start import open_disk
from tests.waiting import wait_until

_MNT_DETACH = 2


class Hung:
    """Whoever asks for anything below ``point`` waits until :meth:`end`; then it is an ordinary folder."""

    def __init__(self, point: Path, end: Callable[[], None]) -> None:
        self.point = point
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    libc, point = ctypes.CDLL(None, use_errno=True), tmp_path / "hung"
    point.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"hung", bytes(point), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")

    def end() -> None:
        os.close(device)  # all that waits fails
        libc.umount2(bytes(point), _MNT_DETACH)

    found = Hung(point, end)
    yield found
    found.end()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_start_waits_for_no_disk(
    tmp_path: Path, hung: Hung, caplog: pytest.LogCaptureFixture, *, is_alone: bool
) -> None:
    folder = hung.point / "hcache"
    dirs = folder if is_alone else f"{tmp_path / 'well'},{folder}"
    sizes = {"disk_size": "16MiB", "segment_size": "1MiB", "disk_free_floor": 0, "io_timeout_s": 0.2}
    given = {"dirs": str(dirs), **sizes, "io_engine": "posix"}
    config = HCacheConfig.from_settings(given)
    tier_arguments._look_ahead(config, 1)  # it may answer when the model is loaded
    with pytest.raises(StoreIOError, match=r"cannot use .* \(--hcache-dirs\): no answer within 0.2 s"):
        open_disk(config, 64, Counters(), Alone())
    config = HCacheConfig.from_settings({**given, "disk_at_start": "optional"})
    with caplog.at_level(logging.WARNING):
        store, left_out = open_disk(config, 64, Counters(), Alone())
    assert store is None
    assert left_out is not None
    assert "runs without it, and tries again" in caplog.text
    hung.end()
    config = HCacheConfig.from_settings({**given, "disk_at_start": "optional", "io_timeout_s": 15.0})

    def is_opened() -> bool:
        store, _ = open_disk(config, 64, Counters(), Alone())
        if store is not None:
            store.close()
        return store is not None

    wait_until(is_opened)
