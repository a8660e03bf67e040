"""The plugin's entry point (group ``sglang.srt.plugins``)."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hcache.sglang_plugin.launch import flags


def register() -> None:
    """Called by SGLang in every process. Adds the flags; everything else waits until the tier is asked for."""
    args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{args}.add_cli_args", flags.add_arguments, HookType.AFTER)
    HookRegistry.register(f"{args}.from_cli_args", flags.from_arguments, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.configure_scheduler_process"
    HookRegistry.register(scheduler, _configure_scheduler, HookType.BEFORE)


def _configure_scheduler(*args: object, **kwargs: object) -> None:
    """In a scheduler process, before anything is built: install the rest if this server uses the tier."""
    server_args = kwargs.get("server_args", args[0] if args else None)
    if server_args is None:
        return
    # Imported where it is needed, so that a server without the tier loads none of it.
    if server_args.radix_cache_backend == flags.BACKEND:
        from sglang_hcache.sglang_plugin import hooks

        hooks.install(server_args.device)
    elif flags.wants_cpu_fixes(server_args):
        from sglang_hcache.sglang_plugin import hooks

        hooks.install_cpu_fixes(server_args.device)
