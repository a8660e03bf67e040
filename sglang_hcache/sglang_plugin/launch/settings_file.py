"""Settings of the flags and of the YAML file that they name. Imports nothing of SGLang: commands read them, too."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import yaml

from sglang_hcache.core.config import CONFIG_FLAG, FLAG_FIELDS
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.paths import whole_path

OVERLOOKED_FILE = (
    "--config: SGLang overlooks --config=FILE in one word, and all that FILE says; write --config FILE"
)
"""It says nothing of it: so a server whose keys are in that file would have none."""


class _Loader(yaml.SafeLoader):
    """A safe loader whose errors are all ``ValueError`` or ``YAMLError``."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            # What the library's constructors say of a value that is not what its tag says, such as `!!bool x`.
            kind = node.tag.rpartition(":")[2]
            raise ValueError(f"line {node.start_mark.line + 1}: {node.value!r} is no {kind}") from None


class _StrictLoader(_Loader):
    """One to which the same name twice is an error: YAML forbids it, and the library takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # `!!map [1]` is no mapping, which the library says below.
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        names = [key.value for key in keys]
        for key in keys:
            if names.count(key.value) > 1:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value!r} is named twice")
        return super().construct_mapping(node, deep)


def settings_of(given: Namespace) -> dict[str, Any]:
    """Settings meant by parsed flags: those of the file, then the flags'. Not checked yet.

    Raises:
        ConfigError: the file cannot be read.
    """
    settings = read_settings(Path(given.hcache_config), CONFIG_FLAG) if given.hcache_config else {}
    for field in FLAG_FIELDS:
        value = getattr(given, f"hcache_{field}")
        if value is not None:
            settings[field] = value
    return settings


def read_settings(path: Path, flag: str, *, is_strict: bool = True) -> dict[str, Any]:
    """Settings by name, not checked yet; an empty file has none.

    Args:
        flag: that named the file, for messages.
        is_strict: whether the same name twice is an error; if not, the last counts.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        text = whole_path(path).read_text(encoding="utf-8")
        settings = yaml.load(text, _StrictLoader if is_strict else _Loader)  # both are safe ones
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {str(path)!r}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{flag}: cannot read {str(path)!r}: it is nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:
        # ValueError: no UTF-8, a date such as 2026-02-30, or nobody's home directory.
        raise ConfigError(f"{flag}: cannot read {str(path)!r}: {error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag}: {str(path)!r} must hold 'setting: value' lines")
    return {str(name): value for name, value in settings.items()}
