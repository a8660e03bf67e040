"""Hooks of ours on SGLang's functions, each of them in place or the start refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.sglang_plugin.seam.release import SGLANG

logger = logging.getLogger(__name__)

Hook = tuple[Callable[..., Any], HookType]
"""What to hook a function with, and how."""


def apply(targets: Mapping[str, Hook]) -> None:
    """Hook SGLang's functions of these dotted names, also those that another plugin has hooked before. Idempotent.

    Raises:
        ConfigError: SGLang, which only logs a hook that fails, did not apply one of them.
    """
    for target, (hook, kind) in targets.items():
        registered = HookRegistry._hooks[target]
        if any(other is hook for _, other, _ in registered):
            continue
        HookRegistry.register(target, hook, kind)
        if target in HookRegistry._patched:
            # Another plugin hooked it when it was loaded, and SGLang would silently skip it now.
            if kind is HookType.REPLACE:
                logger.warning("hcache: hooks of other plugins on %s are without effect", target)
            HookRegistry._apply_target(target, registered[-1:])
    HookRegistry.apply_hooks()
    absent = sorted(target for target in targets if target not in HookRegistry._patched)
    if absent:
        raise ConfigError(
            f"hcache: SGLang did not apply the hooks on {', '.join(absent)}; is this SGLang {SGLANG}?"
        )
