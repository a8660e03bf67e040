"""Host buffers, and pinning them. The driver's part is played by a function: there is no GPU here."""

from __future__ import annotations

import pytest

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device import memory
from sglang_hcache.device.memory import PinnedMemory, available_host_bytes, host_buffer


def test_buffers_are_zeroed_and_begin_at_a_page() -> None:
    for size in (1, 4096, 5 * 2**20 + 3):
        buffer = host_buffer(size)
        assert buffer.shape == (size,)
        assert buffer.ctypes.data % 4096 == 0
        assert not buffer.any()
        buffer[:] = 1


def test_pinned_memory_is_registered_where_it_is_and_kept() -> None:
    seen: list[tuple[int, int]] = []

    def register(address: int, size: int) -> None:
        seen.append((address, size))

    pinned = PinnedMemory(register)
    buffers = [pinned(size) for size in (4096, 12345)]
    assert seen == [(buffer.ctypes.data, buffer.nbytes) for buffer in buffers]
    assert all(kept is buffer for kept, buffer in zip(pinned._kept, buffers, strict=True))


def test_what_the_driver_refuses_is_an_error_that_names_the_flag() -> None:
    pinned = PinnedMemory(lambda _address, _size: "out of memory")
    with pytest.raises(
        ConfigError, match=r"--hcache-host-size: 1.0 MB of it cannot be pinned \(out of memory\)"
    ):
        pinned(2**20)
    assert not pinned._kept


def test_more_than_the_container_has_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes all pages at once: the kernel would end the server."""
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2**20)
    tried: list[int] = []

    def register(_address: int, size: int) -> None:
        tried.append(size)

    pinned = PinnedMemory(register)
    pinned(2**20)
    with pytest.raises(ConfigError, match=r"1.0 MB available"):
        pinned(2**20 + 1)
    assert tried == [2**20]


def test_available_memory_is_a_number() -> None:
    assert 0 < available_host_bytes() < 2**50
