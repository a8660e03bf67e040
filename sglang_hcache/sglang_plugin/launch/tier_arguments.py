"""From our flags to SGLang's arguments, for a server with the tier: checked, and mapped onto SGLang's fields."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from typing import Any

from sglang_hcache.core.config import DiskAtStart, HCacheConfig, flag_of
from sglang_hcache.core.errors import ConfigError, StoreFormatError
from sglang_hcache.core.layout import PlanKind
from sglang_hcache.core.units import format_bytes
from sglang_hcache.sglang_plugin.launch import prefill_graphs, stopping, support
from sglang_hcache.sglang_plugin.launch.flags import BACKEND
from sglang_hcache.sglang_plugin.launch.settings_file import OVERLOOKED_FILE, settings_of
from sglang_hcache.sglang_plugin.seam.budget import pool_share, store_config
from sglang_hcache.store import Preview, StoreConfig, look_ahead

logger = logging.getLogger(__name__)

_NO_RADIX_CACHE = "enable-hierarchical-cache and disable-radix-cache are mutually exclusive"
_HICACHE = re.compile(r"hierarchical[ -]cache|hicache", re.IGNORECASE)
_DISK_FIELDS = (
    *("disk_size", "disk_free_floor", "disk_write_budget", "disk_max_age"),
    *("disk_at_start", "write_policy", "io_engine"),
)


def construct(original: Callable[..., Any], cls: type, args: argparse.Namespace, *rest: object) -> Any:
    """SGLang's arguments, made by ``original``, which is ``ServerArgs.from_cli_args``.

    Raises:
        ConfigError: what cannot be served, naming the flags.
    """
    if args.config is not None:  # one that SGLang reads is not among the arguments any more
        raise ConfigError(OVERLOOKED_FILE)
    config = HCacheConfig.from_settings(settings_of(args))
    _warn_about_no_directory(args, config)
    support.check_arguments(args, cls)
    _map_onto_sglang(args, config)
    try:
        server_args = original(cls, args, *rest)
    except (AssertionError, ValueError) as error:
        # Where it is about HiCache: nobody has asked for that, and we have set its flags.
        if _NO_RADIX_CACHE in str(error):
            is_deterministic = bool(args.enable_deterministic_inference or args.rl_on_policy_target)
            raise ConfigError(support.without_radix_cache(is_deterministic)) from error
        if _HICACHE.search(str(error)):
            raise ConfigError(support.without_hicache(str(error))) from error
        raise
    support.check_server_args(server_args, config)
    _look_ahead(config, server_args.tp_size)
    _leave_host_memory(args, server_args, config)
    stopping.install()
    return server_args


def _map_onto_sglang(args: argparse.Namespace, config: HCacheConfig) -> None:
    args.radix_cache_backend = BACKEND
    # These two make the scheduler speak the protocol of a hierarchical cache with storage to our backend.
    args.enable_hierarchical_cache = True
    args.hicache_storage_backend = BACKEND
    args.hicache_storage_backend_extra_config = config.model_dump_json()
    if args.device != "cpu":
        prefill_graphs.choose_sizes(args)


def _warn_about_no_directory(args: argparse.Namespace, config: HCacheConfig) -> None:
    given = [field for field in _DISK_FIELDS if getattr(args, f"hcache_{field}", None) is not None]
    if given and not config.dirs:
        names = ", ".join(flag_of(field) for field in given)
        logger.warning("hcache: %s: ignored, because --hcache-dirs names no directory for a disk tier", names)


def _leave_host_memory(args: argparse.Namespace, server_args: Any, config: HCacheConfig) -> None:
    """On a CPU SGLang's KV pool takes nearly all of the same memory, if nobody says how much."""
    given = args.mem_fraction_static is not None or args.max_total_tokens is not None
    if server_args.device == "cpu" and not given and config.method is not PlanKind.RECOMPUTE:
        share = pool_share(config, server_args.mem_fraction_static)
        server_args.override("sglang-hcache", mem_fraction_static=share)
        logger.info("hcache: --mem-fraction-static %s leaves room for --hcache-host-size", share)


def _look_ahead(config: HCacheConfig, num_ranks: int) -> None:
    """Say before a model is loaded what the disk tier will say then.

    Raises:
        ConfigError: a directory or the floor will be refused.
    """
    for rank in range(num_ranks):
        settings = store_config(config.of_rank(rank, num_ranks))
        ahead = None if settings is None else _ahead_of(settings, config.disk_at_start)
        if ahead is None:
            return
    if ahead.most_bytes is not None and ahead.most_bytes < config.disk_size:
        logger.warning(
            "hcache: --hcache-disk-size: %s is more than the disk tier will ever get: all that the file systems of "
            "--hcache-dirs have above --hcache-disk-free-floor is %s",
            format_bytes(config.disk_size),
            format_bytes(ahead.most_bytes),
        )


def _ahead_of(settings: StoreConfig, at_start: DiskAtStart) -> Preview | None:
    """What the store of one rank will find; None: it cannot be opened, and need not be."""
    is_optional = at_start is DiskAtStart.OPTIONAL
    try:
        ahead = look_ahead(settings)
    except StoreFormatError as error:
        if not is_optional:
            raise ConfigError(str(error)) from None
        logger.warning(
            "hcache: if that is still so when the model is loaded, this server runs without its disk tier "
            "(--hcache-disk-at-start optional): %s",
            error,
        )
        return None
    for path, holder in ahead.holders.items():  # no error yet: until then the server that has it may end
        logger.warning(
            "hcache: %s is in use by %s: if it still is when the model is loaded, this server %s; "
            "stop that process or use other directories (--hcache-dirs)",
            path,
            holder,
            "runs without its disk tier" if is_optional else "does not start",
        )
    return ahead
