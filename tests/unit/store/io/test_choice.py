"""Which engine is taken, and that the probe leaves nothing behind."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.store.format.names import PROBE_NAME
from sglang_hcache.store.io import choice, rate
from sglang_hcache.store.io.choice import choose_engine
from sglang_hcache.store.io.engine import IOEngine
from sglang_hcache.store.io.nixl import nixl_problem
from sglang_hcache.store.io.rate import OP_BYTES

ROOM = 2**30


def choose(name: str, directory: Path, *, direct: bool = False, spare_bytes: int = ROOM) -> str:
    engine: IOEngine = choose_engine(name, [directory], [direct], lambda: spare_bytes)
    assert engine.close(10.0)
    return engine.name


@pytest.fixture
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    if (problem := nixl_problem()) is not None:
        pytest.skip(problem)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, choice.__name__)
    return caplog


def test_posix_is_posix_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_compare", None)
    assert choose("posix", tmp_path) == "posix"
    assert not messages.records


@pytest.mark.usefixtures("with_nixl")
def test_nixl_is_nixl_without_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_compare", None)
    assert choose("nixl", tmp_path) == "nixl"


def test_nixl_that_does_not_work_is_an_error_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="--hcache-io-engine nixl: NIXL is not installed"):
        choose("nixl", tmp_path)


def test_auto_without_nixl_is_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert choose("auto", tmp_path) == "posix"
    assert messages.messages == [
        "hcache: NIXL is not installed (pip install '/path/to/sglang-hcache[nixl]'); using the posix engine"
    ]


@pytest.mark.usefixtures("with_nixl")
@pytest.mark.parametrize(
    ("posix", "nixl", "chosen"), [(2e9, 3e9, "nixl"), (2e9, 2.09e9, "posix"), (2e9, 1e9, "posix")]
)
def test_auto_takes_the_faster_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
    posix: float,
    nixl: float,
    chosen: str,
) -> None:
    monkeypatch.setattr(choice, "_compare", lambda *_: (posix, nixl))
    assert choose("auto", tmp_path) == chosen
    (message,) = messages.messages
    assert message.startswith(f"hcache: using the {chosen} engine; ")
    assert f"posix reads {posix / 1e6:.0f} MB/s and nixl {nixl / 1e6:.0f} MB/s" in message


@pytest.mark.usefixtures("with_nixl")
@pytest.mark.parametrize("direct", [False, True])
def test_the_probe_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture, direct: bool
) -> None:
    monkeypatch.setattr(choice, "PROBE_TIMEOUT_S", 120.0)  # others may use the disk
    monkeypatch.setattr(rate, "PATIENCE_S", 60.0)
    assert choose("auto", tmp_path, direct=direct, spare_bytes=4 * 2**20) in ("posix", "nixl")
    (record,) = messages.records
    if direct and record.levelno == logging.WARNING:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    assert "MB/s" in record.getMessage()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("with_nixl")
def test_the_probe_follows_no_link_and_replaces_what_a_killed_one_left(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / PROBE_NAME).symlink_to(precious)
    choose("auto", folder, spare_bytes=4 * 2**20)
    assert precious.read_text() == "precious"
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("with_nixl")
def test_there_is_no_probe_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_compare", None)
    assert choose("auto", tmp_path, spare_bytes=4 * 2**20 - 1) == "posix"
    assert messages.messages == ["hcache: no room to compare I/O engines; using the posix engine"]


@pytest.mark.usefixtures("with_nixl")
def test_the_probe_is_as_large_as_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measure(*arguments: Any) -> tuple[float, float]:
        sizes.append(arguments[-1])
        return 1.0, 1.0

    monkeypatch.setattr(choice, "_compare", measure)
    for spare_bytes in (2**40, 5_000_000):
        choose("auto", tmp_path, spare_bytes=spare_bytes)
    assert sizes == [16 * 2**20, 9 * OP_BYTES]


@pytest.mark.usefixtures("with_nixl")
def test_a_probe_that_fails_means_posix(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    assert choose("auto", tmp_path / "missing") == "posix"
    (record,) = messages.records
    assert record.levelno == logging.WARNING
    assert "No such file or directory" in record.getMessage()


@pytest.mark.usefixtures("with_nixl")
def test_a_probe_that_hangs_means_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(choice, "_compare", lambda *_: hang.wait())
    monkeypatch.setattr(choice, "PROBE_TIMEOUT_S", 0.05)
    assert choose("auto", tmp_path) == "posix"
    hang.set()
    (record,) = messages.records
    assert record.levelno == logging.WARNING
    assert "no answer within 0.05 s" in record.getMessage()


@pytest.mark.usefixtures("with_nixl")
def test_after_a_probe_that_hangs_nothing_computes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(choice, "read_rates", lambda *_: hang.wait())
    monkeypatch.setattr(choice, "PROBE_TIMEOUT_S", 0.3)
    assert choose("auto", tmp_path) == "posix"
    busy = [thread for thread in threading.enumerate() if thread.name == "hcache-probe-busy"]
    for thread in busy:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in busy)
    hang.set()
