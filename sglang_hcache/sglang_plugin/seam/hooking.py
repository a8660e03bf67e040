"""Hooks of ours on SGLang's functions, each of them in place or the start refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry
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
    with _few_searches():
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


@contextmanager
def _few_searches() -> Iterator[None]:
    """Let SGLang search all modules for what they have imported of a function only if it is a module's.

    Nobody imports methods, which most of those are that we hook; and each search takes a tenth of a second.
    """
    search = hook_registry._propagate_patch

    def search_for_functions(original: object, wrapped: object, source: object) -> int:
        return search(original, wrapped, source) if isinstance(source, ModuleType) else 0

    hook_registry._propagate_patch = search_for_functions
    try:
        yield
    finally:
        hook_registry._propagate_patch = search
