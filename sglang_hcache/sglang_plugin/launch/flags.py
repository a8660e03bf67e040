"""Command-line flags, and how they travel: as JSON in SGLang's ``hicache_storage_backend_extra_config``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

from sglang_hcache.core.config import (
    COMMAND_LINE_FLAGS,
    CONFIG_FLAG,
    CPU_FIXES_FLAG,
    FLAG_FIELDS,
    TIER_FLAG,
    TIER_MODES,
    HCacheConfig,
    flag_help,
    flag_of,
    tier_mode,
)
from sglang_hcache.core.errors import ConfigError

logger = logging.getLogger(__name__)

BACKEND = "hcache"
_CPU_FIXES = {"hcache_cpu_fixes": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Ours, in a group of their own."""
    group = parser.add_argument_group(
        "hcache", "Hidden-state tier: what the radix cache evicts is kept on host memory and disk."
    )
    group.add_argument(
        TIER_FLAG, type=tier_mode, choices=TIER_MODES, default="off", help=COMMAND_LINE_FLAGS[TIER_FLAG]
    )
    for field in FLAG_FIELDS:
        # Values are checked with the file's in HCacheConfig, which says what is allowed.
        group.add_argument(flag_of(field), metavar="VALUE", help=flag_help(field).replace("%", "%%"))
    group.add_argument(CONFIG_FLAG, metavar="FILE", help=COMMAND_LINE_FLAGS[CONFIG_FLAG])
    group.add_argument(CPU_FIXES_FLAG, action="store_true", help=COMMAND_LINE_FLAGS[CPU_FIXES_FLAG])


@contextlib.contextmanager
def errors_end_the_start() -> Iterator[None]:
    """A ``ConfigError`` is told in a line each of its own, and the process ends with 2."""
    try:
        yield
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"hcache: error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def wants_tier(args: argparse.Namespace) -> bool:
    return getattr(args, "hierarchical_cache", "off") == BACKEND


def prepare_without_tier(args: argparse.Namespace) -> None:
    """Before SGLang's arguments are made from flags that leave the tier off.

    Raises:
        ConfigError: they exclude each other.
    """
    _warn_about_ignored(args)
    _ask_for_cpu_fixes(args)


def config_of(server_args: Any) -> HCacheConfig:
    """Configuration carried by a constructed ``ServerArgs``.

    Raises:
        ConfigError: it did not come through :func:`tier_arguments.construct`, so nothing was checked.
    """
    carried = server_args.hicache_storage_backend_extra_config
    if server_args.hicache_storage_backend != BACKEND or not carried:
        raise ConfigError(f"--radix-cache-backend hcache is not set by hand: use {TIER_FLAG} hcache")
    return HCacheConfig.model_validate(json.loads(carried))


def _ask_for_cpu_fixes(args: argparse.Namespace) -> None:
    """With the tier off: note the flag where :func:`wants_cpu_fixes` finds it in the scheduler's process."""
    if not getattr(args, "hcache_cpu_fixes", False):
        return
    if args.hicache_storage_backend or args.hicache_storage_backend_extra_config:
        raise ConfigError(f"{CPU_FIXES_FLAG} cannot be used with a storage backend of HiCache")
    args.hicache_storage_backend_extra_config = json.dumps(_CPU_FIXES)


def wants_cpu_fixes(server_args: Any) -> bool:
    """Whether a server without the tier was started with ``--hcache-cpu-fixes``."""
    return server_args.hicache_storage_backend_extra_config == json.dumps(_CPU_FIXES)


def _warn_about_ignored(args: argparse.Namespace) -> None:
    given = [
        field for field in (*FLAG_FIELDS, "config") if getattr(args, f"hcache_{field}", None) is not None
    ]
    if given:
        names = ", ".join(flag_of(field) for field in given)
        logger.warning("hcache: %s: ignored, because %s is off", names, TIER_FLAG)
