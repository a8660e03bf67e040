"""SGLang's calls that detach or attach a storage backend at run time: the tier's switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput, DetachHiCacheStorageReqInput

from sglang_hcache.sglang_plugin import hooks


@pytest.fixture
def switched() -> list[bool]:
    return []


@pytest.fixture
def scheduler(switched: list[bool]) -> Any:
    """One that is busy: it has nothing else that a handler could ask."""
    bridge = SimpleNamespace(switch=lambda *, on: switched.append(on))
    return SimpleNamespace(tree_cache=SimpleNamespace(bridge=bridge))


def test_off_and_on(scheduler: Any, switched: list[bool]) -> None:
    """As often as somebody asks."""
    for _ in range(2):
        assert hooks._switch_off(scheduler, DetachHiCacheStorageReqInput()).success
        answer = hooks._switch_on(scheduler, AttachHiCacheStorageReqInput(hicache_storage_backend="hcache"))
        assert answer.success
    assert switched == [False, True] * 2


@pytest.mark.parametrize(
    "asked",
    [
        {"hicache_storage_backend": "file"},
        {"hicache_storage_backend_extra_config_json": "{}"},
        {"hicache_storage_prefetch_policy": "timeout"},
        {"hicache_write_policy": "write_through"},
    ],
)
def test_another_backend_or_other_settings_need_a_restart(
    scheduler: Any, switched: list[bool], asked: dict[str, str]
) -> None:
    request = AttachHiCacheStorageReqInput(**{"hicache_storage_backend": "hcache", **asked})
    answer = hooks._switch_on(scheduler, request)
    assert (answer.success, "need a restart" in answer.message, switched) == (False, True, [])
