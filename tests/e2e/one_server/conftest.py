"""One server for all files of this folder: a start takes long, and in use all of this happens beside each other too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_hcache.cli.server import launch
from sglang_hcache.cli.server.ports import free_port
from tests.e2e.harness import TierServer

SETTINGS = (
    *("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "512"),
    *("--enable-cache-report", "--enable-mixed-chunk", "--max-queued-requests", "8"),
    "--enable-return-hidden-states",
    *("--enable-priority-scheduling", "--disable-priority-preemption"),
    *("--grammar-backend", "outlines"),  # the default one needs a GPU
    *("--hcache-disk-size", "1GB", "--hcache-disk-free-floor", "100MB", "--hcache-host-size", "64MB"),
)


@pytest.fixture(scope="package")
def server(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServer]:
    folder = tmp_path_factory.mktemp("one_server")
    config = folder / "hcache.yaml"
    # Tests hold restores up; and what is saved must not depend on how much else the machine has to do.
    config.write_text("restore_deadline_s: 120\nstaging_size: 16MB")
    more = [
        *("--hcache-dirs", str(folder / "store"), "--hcache-config", str(config)),
        *("--grpc-port", str(free_port())),
    ]
    with with_overlap(), TierServer(folder, ["--model-path", str(tiny_model()), *SETTINGS, *more]) as running:
        assert running.internal_state()["disable_overlap_schedule"] is False
        yield running
        running.assert_nothing_left()


@contextmanager
def with_overlap() -> Iterator[None]:
    """Servers that start here overlap scheduling and forward passes. All other tests' servers do not."""
    kept = [setting for setting in launch._CPU_SETTINGS if setting[0] != "--disable-overlap-schedule"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_CPU_SETTINGS", tuple(kept))
        yield


@pytest.fixture(autouse=True)
def emptied(server: TierServer) -> None:
    """What a test before this one left is gone."""
    server.forget_everything()
