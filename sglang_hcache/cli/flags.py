"""``hcache flags``: every flag and setting of the tier, from the configuration's own code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_hcache.cli.tier_flags import CONFIG_FLAG, CPU_FIXES_FLAG, TIER_FLAG, TIER_MODES
from sglang_hcache.core.config import FILE_ONLY_FIELDS, SIZE_FIELDS, HCacheConfig, flag_of, meaning_of
from sglang_hcache.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its name in the file, its flag (none for rare ones), its default and its meaning as text."""

    name: str
    flag: str | None
    default: str
    allowed: tuple[str, ...]
    meaning: str
    in_file: bool = True
    """Whether the file of ``--hcache-config`` may hold it."""


_SWITCHES = (
    Setting(
        "hierarchical_cache", TIER_FLAG, "off (hcache serve: hcache)", TIER_MODES,
        "hcache turns the tier on. With off the server runs without it; flags of the tier are ignored, with a warning.",
        in_file=False,
    ),
    Setting(
        "hcache_config", CONFIG_FLAG, "none", (),
        "YAML file of settings; flags win over it. In the file a setting is the flag's name without --hcache- and "
        "with underscores, such as disk_size.",
        in_file=False,
    ),
)  # fmt: skip
_CPU_FIXES = Setting(
    "hcache_cpu_fixes", CPU_FIXES_FLAG, "not given", (),
    "Takes no value. With the tier off and on a CPU: fixes SGLang's attention and page allocation as the tier does "
    "there, so that a comparison of both servers shows the tier alone.",
    in_file=False,
)  # fmt: skip
"""What only the command line has."""


def describe() -> Iterator[Setting]:
    """All flags and settings: the tier's switch and its file, then the configuration in its order."""
    yield from _SWITCHES
    for name, info in HCacheConfig.model_fields.items():
        flag = None if name in FILE_ONLY_FIELDS else flag_of(name)
        allowed = tuple(type(info.default)) if isinstance(info.default, StrEnum) else ()
        meaning, _, derived = meaning_of(name).partition(" Default: ")
        default = derived.rstrip(".") or _default_of(name)
        yield Setting(name, flag, default, tuple(map(str, allowed)), meaning)
    yield _CPU_FIXES


def _default_of(name: str) -> str:
    default = HCacheConfig.model_fields[name].default
    if default is None or default == ():
        return "none"
    return format_bytes(default) if name in SIZE_FIELDS else f"{default}"


def flags(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for the docs.")] = False,
) -> None:
    """List the tier's flags, and the settings that only the file of `--hcache-config` can hold."""
    if as_json:
        print(json.dumps([asdict(setting) for setting in describe()], indent=2))
        return
    if as_markdown:
        print(markdown())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("setting", no_wrap=True)  # to be copied: never cut
    table.add_column("default")
    table.add_column("meaning")
    for setting in describe():
        table.add_row(setting.flag or f"{setting.name}\n(file only)", setting.default, _text(setting))
    Console().print(table)


def _text(setting: Setting) -> str:
    return setting.meaning + (f" Allowed: {', '.join(setting.allowed)}." if setting.allowed else "")


def markdown() -> str:
    """The tables of docs/flags.md."""
    found = list(describe())
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{each.flag}` | {each.default} | {_text(each)} |" for each in found if each.flag is not None
    ]
    lines += ["", "In the file only:", "", "| setting | default | meaning |", "|---|---|---|"]
    lines += [f"| `{each.name}` | {each.default} | {_text(each)} |" for each in found if each.flag is None]
    return "\n".join(lines)
