"""The release of SGLang that the rest of the plugin is written for. Imports nothing of it: any may be installed."""

from __future__ import annotations

from importlib import metadata

from sglang_hcache.core.errors import ConfigError

SGLANG = "0.5.17"
"""That of the folder in ``compat/`` which ``hooks.py`` imports."""


def check(flag: str) -> None:
    """Hooks and subclasses fit one release: on another one they may apply, and do something else.

    Args:
        flag: that asks for them.

    Raises:
        ConfigError: another one is installed.
    """
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        installed = "of unknown version"
    if installed.partition("+")[0] != SGLANG:
        raise ConfigError(
            f"{flag}: SGLang {installed} is installed, and this version of sglang-hcache works with SGLang {SGLANG} "
            f'only: pip install "sglang=={SGLANG}", or start the server without {flag}'
        )
