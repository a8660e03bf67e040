"""The YAML file of ``--hcache-config``. Imports nothing of SGLang: commands read it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.paths import whole_path


def read_settings(path: Path, flag: str) -> dict[str, Any]:
    """Settings by name, not checked yet; an empty file has none.

    Args:
        flag: that named the file, for messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        settings = yaml.safe_load(whole_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        # ValueError: no UTF-8, a date such as 2026-02-30, or nobody's home directory.
        raise ConfigError(f"{flag}: cannot read {str(path)!r}: {error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag}: {str(path)!r} must hold 'setting: value' lines")
    return {str(name): value for name, value in settings.items()}
