"""The tier's flags among SGLang's: read, and checked before SGLang, which takes long to start, is there to do it."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_hcache.core.config import (
    CONFIG_FLAG,
    CPU_FIXES_FLAG,
    FILE_ONLY_FIELDS,
    FLAG_FIELDS,
    TIER_FLAG,
    TIER_MODES,
    HCacheConfig,
    flag_of,
    tier_mode,
)
from sglang_hcache.core.errors import ConfigError

_WITH_VALUE = (*map(flag_of, FLAG_FIELDS), CONFIG_FLAG, TIER_FLAG)
_FLAGS = (*map(flag_of, FLAG_FIELDS), CONFIG_FLAG, CPU_FIXES_FLAG)
_PREFIX = "--hcache"
"""No flag of SGLang begins so."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tier's flags that are in ``arguments``, and the other arguments. Flags that are abbreviated are others.

    Raises:
        ConfigError: one of them has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in _WITH_VALUE:
        parser.add_argument(flag)
    try:
        return parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None


def check(arguments: Sequence[str]) -> None:
    """Refuse what the server would refuse as well, half a minute and hundreds of lines of usage later.

    Raises:
        ConfigError: no such flag, a value that is not allowed or in several words; or SGLang overlooks its own file.
    """
    from sglang_hcache.sglang_plugin.launch.settings_file import OVERLOOKED_FILE, settings_of

    if any(one.startswith("--config=") for one in arguments):
        raise ConfigError(OVERLOOKED_FILE)
    for argument in arguments:
        if argument.startswith(_PREFIX):
            _check_name(argument.partition("=")[0])
    given, _ = parse(arguments)
    _check_words(arguments)
    mode = tier_mode(given.hierarchical_cache)
    if mode not in (None, *TIER_MODES):
        raise ConfigError(f"{TIER_FLAG}: {mode!r} is not allowed; allowed: {', '.join(TIER_MODES)}")
    if "--config" not in arguments and mode != "off":  # SGLang's own file may hold the rest
        HCacheConfig.from_settings(settings_of(given))


def check_model(paths: Iterable[str | None]) -> None:
    """Refuse a model that is meant as a folder, and is none: SGLang would look for it in the hub.

    Raises:
        ConfigError: it is not there, or empty, or this user may not look.
    """
    for path in paths:
        if path is None or not path.startswith(("/", "./", "../", "~")):
            continue
        try:
            is_there = Path(path).exists()
            is_empty = Path(path).is_dir() and not any(Path(path).iterdir())
        except OSError as error:
            raise ConfigError(f"--model-path: cannot look at {path}: {error.strerror}") from None
        if not is_there:
            hint = "; the shell replaces ~ only where a word begins with it" if path.startswith("~") else ""
            raise ConfigError(f"--model-path: {path} does not exist{hint}")
        if is_empty:
            raise ConfigError(f"--model-path: {path} is an empty folder")


def _check_words(arguments: Sequence[str]) -> None:
    """SGLang takes no words of their own, so one behind a flag's value belongs to that."""
    for place, argument in enumerate(arguments):
        flag, is_assigned, value = argument.partition("=")
        words = [value, *arguments[place + 1 :]] if is_assigned else arguments[place + 1 :]
        if flag in _WITH_VALUE and len(words) > 1 and not words[1].startswith("-"):
            raise ConfigError(f"{flag}: it takes one value, and {words[1]!r} follows {words[0]!r}")


def _check_name(name: str) -> None:
    """An abbreviation is SGLang's to accept."""
    if any(flag.startswith(name) for flag in _FLAGS):
        return
    setting = re.sub(r"\W", "_", name.removeprefix(_PREFIX)).strip("_")
    if setting in FILE_ONLY_FIELDS:
        raise ConfigError(f"{name}: {setting} has no flag; set it in the file of {CONFIG_FLAG}")
    close = difflib.get_close_matches(name, _FLAGS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"{name}: there is no such flag; {hint}`hcache flags` lists all")
