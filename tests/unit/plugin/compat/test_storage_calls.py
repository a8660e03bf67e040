"""SGLang's calls that attach or detach a storage backend at run time: the tier refuses both."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import scheduler as managers
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput, DetachHiCacheStorageReqInput

from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import HCacheRadixCache


def test_no_storage_backend_comes_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang passes neither on without ``--admin-api-key``; so the server here is its idle scheduler alone."""
    monkeypatch.setattr(managers, "get_serving", lambda: SimpleNamespace(served_model_name="m"))
    scheduler: Any = SimpleNamespace(
        enable_hierarchical_cache=True,
        enable_hicache_storage=True,
        is_fully_idle=lambda: True,
        tree_cache=object.__new__(HCacheRadixCache),
    )
    attach = inspect.unwrap(managers.Scheduler.attach_hicache_storage_wrapped)
    answer = attach(scheduler, AttachHiCacheStorageReqInput(hicache_storage_backend="file"))
    assert (answer.success, "--hcache-dirs" in answer.message) == (False, True), answer
    answer = inspect.unwrap(managers.Scheduler.detach_hicache_storage_wrapped)(
        scheduler, DetachHiCacheStorageReqInput()
    )
    assert (answer.success, "--hierarchical-cache off" in answer.message) == (False, True), answer
    assert scheduler.enable_hicache_storage
