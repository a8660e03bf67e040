"""Hooks of ours on SGLang's functions, each of them in place or the start refused."""

from __future__ import annotations

import logging
import sys
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
    with _one_search():
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
def _one_search() -> Iterator[None]:
    """Replace what modules have imported of the functions that are hooked inside, in one search for all of them.

    SGLang's own goes through thousands of modules for each: seconds of every start, for two dozen hooks.
    """
    search = hook_registry._propagate_patch
    hooked: dict[int, tuple[object, object]] = {}

    def note(original: object, wrapped: object, _source: object) -> int:
        hooked[id(original)] = original, wrapped  # with the original, so that its id stays its own
        return 0

    hook_registry._propagate_patch = note
    try:
        yield
    finally:
        hook_registry._propagate_patch = search
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        for module in modules if hooked else ():
            names = dict(vars(module))  # another thread may import something meanwhile
            if hooked.keys().isdisjoint(map(id, names.values())):
                continue  # nearly always: they have 330,000 names
            for name, value in names.items():
                if id(value) in hooked:
                    setattr(module, name, _newest(value, hooked))


def _newest(function: object, hooked: Mapping[int, tuple[object, object]]) -> object:
    """What ``function`` has become; it may be hooked more than once."""
    while id(function) in hooked:
        _, function = hooked[id(function)]
    return function
