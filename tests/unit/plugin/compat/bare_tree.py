"""Our radix tree without a server."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_hcache.sglang_plugin.compat.v0_5_17.cache import HCacheRadixCache
from sglang_hcache.sglang_plugin.compat.v0_5_17.dropped import Dropped


class BareTree(HCacheRadixCache):
    """SGLang's tree, ours as far as evictions go.

    Args:
        allocator, bridge: stand-ins for what evictions ask.
    """

    def __init__(self, allocator: Any, bridge: Any, page_size: int = 1) -> None:
        self.evictions, self._dropped, self._enough = 0, Dropped(), None
        self._bridge = None  # else it would be told of the reset
        RadixCache.__init__(self, CacheInitParams(False, None, allocator, page_size))  # type: ignore[arg-type]
        self._bridge = bridge
