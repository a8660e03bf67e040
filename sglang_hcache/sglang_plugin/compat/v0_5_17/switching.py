"""SGLang's calls that detach and attach a storage backend: the switch of the tier while the server runs.

SGLang's own handlers want an idle server, and would make its scheduler forget that the cache has a storage: it would
tell us of no request any more, while restores still hold slots.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    AttachHiCacheStorageReqOutput,
    DetachHiCacheStorageReqInput,
    DetachHiCacheStorageReqOutput,
)

from sglang_hcache.sglang_plugin.launch.flags import BACKEND
from sglang_hcache.sglang_plugin.serving.bridge import Bridge


def detach(_request: DetachHiCacheStorageReqInput, bridge: Bridge) -> DetachHiCacheStorageReqOutput:
    """Nothing is saved or restored from now on."""
    bridge.switch(on=False)
    return DetachHiCacheStorageReqOutput(
        success=True, message="hcache: nothing is saved or restored; what is stored stays"
    )


def attach(request: AttachHiCacheStorageReqInput, bridge: Bridge) -> AttachHiCacheStorageReqOutput:
    """As it was started; there are no other settings at run time."""
    settings = (
        request.hicache_storage_backend_extra_config_json,
        request.hicache_storage_prefetch_policy,
        request.hicache_write_policy,
    )
    if request.hicache_storage_backend != BACKEND or any(setting is not None for setting in settings):
        return AttachHiCacheStorageReqOutput(
            success=False,
            message='hcache: this call only switches the tier on again, as it was started: {"hicache_storage_backend": '
            f'"{BACKEND}"}} and nothing else; other directories and settings need a restart',
        )
    bridge.switch(on=True)
    return AttachHiCacheStorageReqOutput(success=True, message="hcache: prompts are saved and restored")
