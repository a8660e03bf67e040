"""SGLang's own YAML file of arguments (``--config FILE``): what is in it was passed by the user, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hcache.core.errors import ConfigError

_FLAG = "--config"


def arguments_in_file(arguments: Sequence[str]) -> list[str]:
    """What SGLang takes from the file that ``arguments`` name, each as ``--flag=value``; they win over it.

    None where the file cannot be read: SGLang says why. It does not look at ``--config=FILE`` in one word.
    """
    from sglang_hcache.sglang_plugin.settings_file import read_settings

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
