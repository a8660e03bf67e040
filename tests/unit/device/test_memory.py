"""Host buffers, and pinning them. The driver's part is played by a function: there is no GPU here."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device import memory
from sglang_hcache.device.memory import PinnedMemory, available_host_bytes, host_buffer
from sglang_hcache.store import aligned_empty


def test_buffers_are_zeroed_and_begin_at_a_page() -> None:
    for size in (1, 4096, 5 * 2**20 + 3):
        buffer = host_buffer(size)
        assert buffer.shape == (size,)
        assert buffer.ctypes.data % 4096 == 0
        assert not buffer.any()
        buffer[:] = 1


def kernel_flags(address: int) -> list[str]:
    """What the kernel says of this process's mapping at ``address``."""
    flags: dict[range, list[str]] = {}
    place = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if name == "VmFlags:":
            flags[place] = rest
        elif not name.endswith(":"):
            place = range(*(int(end, 16) for end in name.split("-")))
    return next(found for place, found in flags.items() if address in place)


@pytest.mark.parametrize("make", [host_buffer, aligned_empty])
@pytest.mark.parametrize("size", [8192, 5 * 2**20])
def test_core_dumps_leave_buffers_out(make: Callable[[int], npt.NDArray[np.uint8]], size: int) -> None:
    plain = mmap.mmap(-1, size)
    try:
        plain.madvise(mmap.MADV_DONTDUMP)
    except OSError:
        pytest.skip("this kernel puts everything into core dumps")
    buffer = make(size)
    first = buffer.ctypes.data
    assert "dd" in kernel_flags(first)
    assert "dd" in kernel_flags(first + buffer.nbytes - 1)


def test_pinned_memory_is_registered_where_it_is_as_long_as_it_is_used() -> None:
    known: dict[int, int] = {}

    def register(address: int, size: int) -> None:
        known[address] = size

    pinned = PinnedMemory(register, known.pop)
    buffers = [pinned(size) for size in (4096, 12345)]
    assert known == {buffer.ctypes.data: buffer.nbytes for buffer in buffers}
    first, second = (buffer.ctypes.data for buffer in buffers)
    part = torch.from_numpy(buffers.pop()[100:200].view(np.float16))
    assert set(known) == {first, second}, "somebody may still read or write a part of it"
    assert part.numel() == 50
    del part
    assert set(known) == {first}


def test_what_the_driver_refuses_is_an_error_that_names_the_flag() -> None:
    released: list[int] = []
    pinned = PinnedMemory(lambda _address, _size: "out of memory", released.append)
    with pytest.raises(
        ConfigError, match=r"--hcache-host-size: 1.0 MB of it cannot be pinned \(out of memory\)"
    ):
        pinned(2**20)
    assert not released


def test_more_than_the_container_has_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes all pages at once: the kernel would end the server."""
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2**20)
    tried: list[int] = []

    def register(_address: int, size: int) -> None:
        tried.append(size)

    pinned = PinnedMemory(register, lambda _address: None)
    pinned(2**20)
    with pytest.raises(ConfigError, match=r"1.0 MB available"):
        pinned(2**20 + 1)
    assert tried == [2**20]


def test_available_memory_is_a_number() -> None:
    assert 0 < available_host_bytes() < 2**50


def test_files_that_could_be_read_again_do_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has just read a checkpoint is full of it."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_meminfo", lambda name: {"MemAvailable": 2_000_000_000}[name])
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900000000\n")
    assert available_host_bytes() == 2_000_000_000, "no limit"
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert available_host_bytes() == 100_000_000
    (tmp_path / "memory.stat").write_text(
        "anon 1\nfile 800000000\nfile_dirty 5000000\nfile_writeback 1000000\n"
        "inactive_file 300000000\nactive_file 206000000\n"
    )
    assert available_host_bytes() == 600_000_000


def test_every_group_that_this_process_is_in_has_a_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of systemd, and a job of Slurm, sees all groups: its own one is not the first."""

    def limit(group: str, most: int, used: int) -> None:
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")

    own = tmp_path / "own"
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    limit("system.slice/hcache.service", 5_000_000, 1_000_000)
    limit("system.slice/another.service", 10, 10)
    own.write_text("1:name=systemd:/elsewhere\n0::/system.slice/hcache.service\n")
    assert available_host_bytes() == 4_000_000
    limit("system.slice", 9_000_000, 6_000_000)
    assert available_host_bytes() == 3_000_000, "what the others in it leave"
    limit("", 7_000_000, 6_500_000)
    assert available_host_bytes() == 500_000
    for inside in ("0::/\n", "0::/../of-the-host\n", "0::/docker/not-to-be-seen-here\n", "4:memory:/v1\n"):
        own.write_text(inside)
        assert available_host_bytes() == 500_000, "a container's"
    own.unlink()
    assert available_host_bytes() == 500_000


@pytest.mark.parametrize("place", ["memory/docker/1234", "memory"])
def test_the_log_names_the_limit_that_counts_and_the_one_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """The kernel of a machine with cgroup v1 ends a server without a word."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_meminfo", lambda name: {"MemTotal": 64_000_000_000}[name])
    (tmp_path / "own").write_text("11:cpuset:/\n4:memory:/docker/1234\n0::/\n")
    memory.tell_limits()
    assert not caplog.records
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory.max").write_text("32000000000\n")
    memory.tell_limits()
    [record] = caplog.records
    assert record.message == f"hcache: host memory is limited to 32.0 GB ({tmp_path}/memory.max)"
    caplog.clear()
    (tmp_path / place / "memory.limit_in_bytes").write_text("16000000000\n")
    memory.tell_limits()
    assert f"limited to 16.0 GB by {tmp_path / place}/memory.limit_in_bytes (cgroup v1)" in caplog.text
