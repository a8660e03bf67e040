"""``hcache flags``: every flag and setting of the tier, from the configuration's own code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.table import Table

from sglang_hcache.cli.options import AsJson
from sglang_hcache.cli.report import print_report
from sglang_hcache.core.config import (
    COMMAND_LINE_FLAGS,
    CONFIG_FLAG,
    CPU_FIXES_FLAG,
    FLAG_FIELDS,
    SIZE_FIELDS,
    TIER_FLAG,
    TIER_MODES,
    HCacheConfig,
    flag_of,
    meaning_of,
)
from sglang_hcache.core.units import exact_size


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


def describe() -> Iterator[Setting]:
    """All flags and settings: the tier's switch and its file, then the configuration in its order."""
    yield _of_command_line(TIER_FLAG, "off (hcache serve: hcache)", TIER_MODES)
    yield _of_command_line(CONFIG_FLAG, "none")
    for name, info in HCacheConfig.model_fields.items():
        flag = flag_of(name) if name in FLAG_FIELDS else None
        allowed = tuple(type(info.default)) if isinstance(info.default, StrEnum) else ()
        meaning, _, derived = meaning_of(name).partition(" Default: ")
        default = derived.rstrip(".") or _default_of(name)
        yield Setting(name, flag, default, tuple(map(str, allowed)), meaning)
    yield _of_command_line(CPU_FIXES_FLAG, "not given")


def _of_command_line(flag: str, default: str, allowed: tuple[str, ...] = ()) -> Setting:
    name = flag.removeprefix("--").replace("-", "_")
    return Setting(name, flag, default, allowed, COMMAND_LINE_FLAGS[flag], in_file=False)


def _default_of(name: str) -> str:
    default = HCacheConfig.model_fields[name].default
    if default is None or default == ():
        return "none"
    return exact_size(default) if name in SIZE_FIELDS else f"{default}"


def flags(as_json: AsJson = False) -> None:
    """List the tier's flags, and the settings that only the `--hcache-config` file can hold."""
    if as_json:
        print(json.dumps([asdict(setting) for setting in describe()], indent=2))
        return
    print_report([settings_table(describe())])


def settings_table(settings: Iterable[Setting]) -> Table:
    """``settings`` for people."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("setting", no_wrap=True)  # to be copied: never cut
    table.add_column("default")
    table.add_column("meaning")
    for setting in settings:
        table.add_row(setting.flag or f"{setting.name}\n(file only)", setting.default, _text(setting))
    return table


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
