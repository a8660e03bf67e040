"""The plugin's entry point (group ``sglang.srt.plugins``).

Everything is imported where it is needed: SGLang loads this in all its processes, also of a server without the tier.
What another release of SGLang may lack is imported once the release is checked.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register() -> None:
    """Called by SGLang in every process. Adds the flags; everything else waits until the tier is asked for."""
    args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{args}.add_cli_args", _add_arguments, HookType.AFTER)
    HookRegistry.register(f"{args}.from_cli_args", _from_arguments, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.configure_scheduler_process"
    HookRegistry.register(scheduler, _configure_scheduler, HookType.BEFORE)


def _add_arguments(_result: object, parser: argparse.ArgumentParser, *_args: object) -> None:
    from sglang_hcache.sglang_plugin.launch import flags

    flags.add_arguments(parser)


def _from_arguments(original: Callable[..., Any], cls: type, args: argparse.Namespace, *rest: object) -> Any:
    """Maps our flags onto SGLang's fields before construction."""
    from sglang_hcache.sglang_plugin.launch import flags
    from sglang_hcache.sglang_plugin.seam import release

    with flags.errors_end_the_start():
        if not flags.wants_tier(args):
            if getattr(args, "hcache_cpu_fixes", False):
                release.check(flags.CPU_FIXES_FLAG)
            flags.prepare_without_tier(args)
            return original(cls, args, *rest)
        release.check(flags.TIER_FLAG)
        from sglang_hcache.sglang_plugin.launch import tier_arguments

        return tier_arguments.construct(original, cls, args, *rest)


def _configure_scheduler(*args: object, **kwargs: object) -> None:
    """In a scheduler process, before anything is built: install the rest if this server uses the tier."""
    server_args = kwargs.get("server_args", args[0] if args else None)
    if server_args is None:
        return
    from sglang_hcache.sglang_plugin.launch import flags
    from sglang_hcache.sglang_plugin.seam import release

    with flags.errors_end_the_start():
        if server_args.radix_cache_backend == flags.BACKEND:
            release.check(flags.TIER_FLAG)
            # Of some 8,000 modules nothing ever goes, and each full collection takes most of a second with them: in
            # the middle of the start, and then between two passes.
            gc.freeze()
            from sglang_hcache.sglang_plugin import hooks

            hooks.install(server_args.device)
        elif flags.wants_cpu_fixes(server_args):
            release.check(flags.CPU_FIXES_FLAG)
            from sglang_hcache.sglang_plugin import hooks

            hooks.install_cpu_fixes(server_args.device)
