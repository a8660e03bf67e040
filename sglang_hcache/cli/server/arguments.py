"""SGLang's arguments, on the command line and in SGLang's own YAML file of them (``--config FILE``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import ConfigError

_FLAG = "--config"


def values_of(arguments: Sequence[str], *flags: str) -> list[str | None]:
    """What follows each of ``flags``, names of one setting, in ``arguments``, as ``flag value`` or ``flag=value``."""
    values: list[str | None] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        if name in flags:
            values.append(value if is_assigned else following)
    return values


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """``arguments`` without ``flag`` and its value."""
    kept: list[str] = []
    skip_value = False
    for argument in arguments:
        if skip_value:
            skip_value = False
        elif argument == flag:
            skip_value = True
        elif not argument.startswith(flag + "="):
            kept.append(argument)
    return kept


def arguments_in_file(arguments: Sequence[str]) -> list[str]:
    """What SGLang takes from the file that ``arguments`` name, each as ``--flag=value``; they win over it.

    None where the file cannot be read: SGLang says why. It does not look at ``--config=FILE`` in one word.
    """
    from sglang_hcache.sglang_plugin.launch.settings_file import read_settings

    if _FLAG not in arguments[:-1]:
        return []
    try:
        path = Path(arguments[list(arguments).index(_FLAG) + 1])
        settings = read_settings(path, _FLAG, is_strict=False)
    except ConfigError:
        return []
    return [f"--{name.replace('_', '-')}={_text(value)}" for name, value in settings.items()]


def _text(value: Any) -> str:
    """As SGLang writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
