"""The one configuration of the tier, and the only reader of the environment.

Flags and the YAML file of ``--hcache-config`` both end in an :class:`HCacheConfig`; flags win.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import PlanKind
from sglang_hcache.core.paths import check_distinct, rank_dir, whole_path
from sglang_hcache.core.units import (
    exact_size,
    format_bytes,
    format_duration,
    parse_duration,
    parse_size,
    parse_size_or_percent,
)

TIER_FLAG = "--hierarchical-cache"
TIER_MODES = ("off", "hcache")
CONFIG_FLAG = "--hcache-config"
CPU_FIXES_FLAG = "--hcache-cpu-fixes"
COMMAND_LINE_FLAGS = {
    TIER_FLAG: "hcache turns the tier on. With off, the server runs without the tier and ignores the tier's "
    "flags, with a warning.",
    CONFIG_FLAG: "YAML file of settings; flags override it. In the file, a setting is named like its flag, without "
    "--hcache- and with underscores, such as disk_size.",
    CPU_FIXES_FLAG: "Takes no value. On a CPU with the tier off: applies the same fixes to SGLang's attention, page "
    "allocation and multi-rank startup as the tier does, so that comparing both servers shows the tier alone.",
}
"""What only the command line has -> its meaning."""


class WritePolicy(StrEnum):
    WRITE_BACK = "write_back"
    WRITE_THROUGH = "write_through"


class RestoreWhen(StrEnum):
    FASTER = "faster"
    ALWAYS = "always"


class DiskAtStart(StrEnum):
    REQUIRED = "required"
    OPTIONAL = "optional"


class IOEngineName(StrEnum):
    AUTO = "auto"
    NIXL = "nixl"
    POSIX = "posix"


def _as_text(size: int | str) -> str:
    return size if isinstance(size, str) else exact_size(size)


# In JSON with its unit: a small number without one would not be taken back.
_IN_JSON = PlainSerializer(_as_text, when_used="json")

Size = Annotated[int, BeforeValidator(parse_size), _IN_JSON]
"""Bytes; input may be text such as ``8GB`` or ``512MiB``."""

SizeOrPercent = Annotated[int | str, BeforeValidator(parse_size_or_percent), _IN_JSON]
"""The same, or text such as ``10%``."""

Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_duration)]
"""Seconds; outside it is text such as ``12h`` or ``30d``, for a number alone would be a guess."""


def _no_truth_value(value: Any) -> Any:
    """YAML reads ``yes``, ``on`` and ``true`` as a truth value, and pydantic would take that for 1."""
    if isinstance(value, bool):
        raise ValueError("write a number")
    return value


Number = Annotated[float, BeforeValidator(_no_truth_value)]


class HCacheConfig(BaseModel):
    """Settings of the tier. Each field is the flag ``--hcache-<field with dashes>`` unless noted."""

    # No infinity: JSON, which brings the settings to the scheduler, has none.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    dirs: tuple[Path, ...] = ()
    """Directories of the disk tier, one per drive, at most 16, separated by commas. Without this flag there is only
    the host tier, and nothing is written to disk."""
    disk_size: Size = 64 * 10**9
    """Hard cap on the physical bytes of the disk tier: all directories and all ranks together."""
    disk_free_floor: SizeOrPercent = 8 * 10**9
    """Free space to leave on each file system, in bytes or as a share of its size, such as 10%. If other data fills
    the disk, the tier deletes its own chunks to keep this much free."""
    disk_at_start: DiskAtStart = DiskAtStart.REQUIRED
    """What to do if the disk tier cannot be opened at startup: a directory is in use, belongs to another user or has
    another format, or disks are out of service or hanging (all disks of an existing store, or any disk of a new one,
    which may not be read-only either). required: the server does not start. optional: the server logs a warning, runs
    with the host tier only, and retries at growing intervals, from 2 s to one minute, until the disk tier opens. Use
    optional if an orchestrator restarts the server."""
    host_size: Size = 4 * 2**30
    """Host memory for chunks, staging and restore buffers together, for all ranks. On a CPU it is committed as it
    fills; on a GPU all of it is pinned at startup. With ``method`` recompute none is allocated."""
    write_policy: WritePolicy = WritePolicy.WRITE_BACK
    """When a chunk is written to disk: when its tokens leave the device or host memory runs low (write_back), or as
    soon as it is complete (write_through)."""
    method: PlanKind = PlanKind.AUTO
    """How layers are restored. hidden: from hidden states, projected to K and V. kv: from stored K and V. hybrid: from
    stored K and V, with the first layers recomputed where that is faster. recompute: everything from tokens, nothing
    is stored (for comparisons). auto: the mix of all three that is fastest on this machine."""
    restore: RestoreWhen = RestoreWhen.FASTER
    """Which stored prefixes to restore. faster: those predicted to be restored faster than they can be recomputed.
    always: all (for comparisons, and where predictions are wrong); kv and hidden then measure nothing at startup."""
    profile: Path | None = None
    """Costs of this model on this machine, from ``hcache profile``, used for predictions. Default: one saved for this
    model and machine; otherwise a few seconds of measurements at startup."""
    io_engine: IOEngineName = IOEngineName.AUTO
    """How the disk tier is read and written: nixl (NIXL with io_uring, needs the extra ``nixl``), posix (threads with
    preadv and pwritev), or whichever a short probe at startup finds faster (auto)."""
    disk_write_budget: Size | None = Field(default=None, gt=0)
    """Maximum bytes of chunks, with their headers, that the disk tier writes in any 24 hours, to limit wear on the
    drives. They are counted by whole hours, so up to an hour longer. Its own small files and probes of the disk are not
    counted. When the budget is nearly used up, chunks that were never reused are not written. Use the capacity of the
    drives times their rated drive writes per day."""
    disk_max_age: Duration | None = None
    """Maximum age of a chunk on disk, such as 12h or 30d, counted from when it was written and regardless of use.
    Deletion may come up to an eighth earlier. If the server was stopped, the next startup deletes overdue chunks. Host
    memory has no age limit, so this alone does not bound how long prompts are kept."""

    # In the file of --hcache-config only: rarely changed.
    staging_size: Size | None = Field(default=None, gt=0)
    """Part of ``host_size`` that buffers rows during forward passes, at most half of it. Rows that do not fit are not
    saved; the log warns at startup if that can happen to a prefill. Default: two of the largest passes (a prefill, or
    the decoding of as many requests as may run, if that is given and more), or three on a GPU with overlap scheduling,
    where a pass begins before the previous one has ended; at most a quarter of ``host_size``."""
    segment_size: Size | None = Field(default=None, ge=2**20)
    """Size of one segment across all directories, at most a quarter of ``disk_size``. Disk eviction frees one segment
    at a time. Default: 1/8 of ``disk_size``, at most 256 MiB; for a ``disk_size`` above 256 GiB, 1/1,024 of it, at
    most 32 GiB."""
    io_timeout_s: Number = Field(default=5.0, gt=0, le=3600)
    """Seconds after which a read or write is abandoned (a write gets one more second for each 20 MB) and its directory
    is not used until it responds again; at most 3600."""
    measure_s: Number = Field(default=0.2, gt=0, le=60)
    """Seconds spent on each measurement at startup when no profile provides it, at most 60."""
    save_profile: Path | None = None
    """File that receives what was measured at startup; ``hcache profile`` uses this. Measures even if a profile
    exists."""
    restore_deadline_s: Number = Field(default=10.0, gt=0, le=3600)
    """Seconds, including the wait for earlier restores, after which a restore is abandoned and its request recomputed;
    at most 3600. Applies with ``restore`` always and where no costs are known to predict with. Otherwise the deadline
    follows from the predicted recompute time."""
    shutdown_flush_s: Number = Field(default=10.0, ge=0, le=12)
    """Maximum seconds that a graceful stop spends on saving the latest rows and writing host memory to disk, at most
    12: SGLang kills its processes 15 s after asking them to stop."""

    @field_validator("dirs", mode="before")
    @classmethod
    def _split_dirs(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list | tuple) or not all(isinstance(part, str | Path) for part in value):
            raise ValueError("write directories separated by commas, or a list of them")
        if value and not all(str(part) for part in value):
            raise ValueError("one of the names is empty; leave the flag out for a server without a disk tier")
        return tuple(whole_path(part) for part in value)

    @field_validator("profile", "save_profile")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else whole_path(value)

    @field_validator("dirs")
    @classmethod
    def _distinct_dirs(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        """By their names: a disk that hangs would not say where links lead (``store.look_ahead`` asks it)."""
        check_distinct([Path(os.path.normpath(path)) for path in value])
        return value

    @field_validator("staging_size", "segment_size")
    @classmethod
    def _fits_into_its_whole(cls, value: int | None, info: ValidationInfo) -> int | None:
        whole, parts = {"staging_size": ("host_size", 2), "segment_size": ("disk_size", 4)}[
            str(info.field_name)
        ]
        if value is not None and whole in info.data and value * parts > info.data[whole]:
            raise ValueError(
                f"at most {format_bytes(info.data[whole] / parts)}, 1/{parts} of {flag_of(whole)}"
            )
        return value

    @property
    def segment_bytes(self) -> int:
        """``segment_size``, given or derived."""
        if self.segment_size is None:
            # Each segment costs the store's upkeep some time every second: no more than about a thousand up to 32 TiB.
            most = max(256 * 2**20, min(self.disk_size // 1024, 32 * 2**30))
            return max(min(self.disk_size // 8, most), 2**20)
        return self.segment_size

    def without_hidden_states(self) -> HCacheConfig:
        """For a model whose hidden states cannot be used: of ``auto`` remain K and V, and recomputing."""
        return self.model_copy(update={"method": PlanKind.HYBRID}) if self.method is PlanKind.AUTO else self

    def of_rank(self, rank: int, num_ranks: int) -> HCacheConfig:
        """The share of one of several processes that serve a model together."""
        if num_ranks == 1:
            return self
        shared = ("disk_size", "host_size", "disk_write_budget", "staging_size", "segment_size")
        sizes = {name: value // num_ranks for name in shared if (value := getattr(self, name)) is not None}
        return self.model_copy(
            update={**sizes, "dirs": tuple(rank_dir(path, rank, num_ranks) for path in self.dirs)}
        )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> HCacheConfig:
        """Validate ``settings`` (field name -> value).

        Raises:
            ConfigError: one line per wrong setting with its flag, the value and what is allowed.
        """
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            lines = [_explain(dict(item)) for item in error.errors()]
            raise ConfigError("\n".join(lines)) from None


FILE_ONLY_FIELDS = frozenset(
    {
        "staging_size",
        "segment_size",
        "io_timeout_s",
        "measure_s",
        "save_profile",
        "restore_deadline_s",
        "shutdown_flush_s",
    }
)
"""Fields without a flag of their own."""

FLAG_FIELDS = tuple(name for name in HCacheConfig.model_fields if name not in FILE_ONLY_FIELDS)
"""Fields with one."""

SIZE_FIELDS = frozenset(
    name
    for name, kind in get_annotations(HCacheConfig, eval_str=True).items()
    if kind == SizeOrPercent or Size in (kind, *get_args(kind))
)
"""Fields in bytes, which may be given with a unit."""


def flag_of(field: str) -> str:
    """How a user sets ``field``."""
    if field in FILE_ONLY_FIELDS:
        return f"{field} (in the file of {CONFIG_FLAG})"
    return "--hcache-" + field.replace("_", "-")


def meaning_of(field: str) -> str:
    """What a field sets, in a sentence or a few."""
    return " ".join((HCacheConfig.model_fields[field].description or "").replace("``", "").split())


def flag_help(field: str) -> str:
    """What ``--help`` says of a field: its meaning, what is allowed, the default."""
    default, text = HCacheConfig.model_fields[field].default, meaning_of(field)
    if isinstance(default, StrEnum):
        return f"{text} Allowed: {', '.join(type(default))}; default: {default}."
    if field in SIZE_FIELDS:
        return (
            f"{text} E.g. 8GB or 512MiB; default: {'no limit' if default is None else exact_size(default)}."
        )
    return text


def reason_of(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, of one of pydantic's errors, to come behind the value's name."""
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should", "it must")


def _explain(error: dict[str, Any]) -> str:
    field = str(error["loc"][0]) if error["loc"] else ""
    value = error.get("input")
    if error["type"] == "extra_forbidden":
        known = sorted(HCacheConfig.model_fields)
        meant = get_close_matches(field.lstrip("-").removeprefix("hcache-").replace("-", "_"), known, n=1)
        hint = f"did you mean {meant[0]}? Known settings" if meant else "known settings"
        return f"unknown setting {field!r} in the file of {CONFIG_FLAG}; {hint}: {', '.join(known)}"
    if error["type"] == "enum":
        return f"{flag_of(field)}: {value!r} is not allowed; allowed: {error['ctx']['expected']}"
    reason = reason_of(error)
    if reason.startswith(repr(value)):
        return f"{flag_of(field)}: {reason}"
    return f"{flag_of(field)}: {value!r} is not allowed; {reason}"


HOST_PARTS = 8
"""Buffers of restores take one of so many parts of ``host_size`` at most."""

STAGING_PARTS = 4
"""Staging takes one of so many parts of ``host_size`` at most, unless ``staging_size`` is given."""

STAGED_PASSES, STAGED_PASSES_AHEAD = 2, 3
"""Prefill passes that staging should hold; the second one where a pass begins before the last one has ended."""


KV_POOLS = 2
"""KV pools that host memory should hold: what the device evicts was saved before, and must not have left since."""


def host_size_for(staging_bytes: int, chunk_bytes: int) -> int:
    """The ``host_size`` that has room for ``chunk_bytes`` of chunks beside a staging area of ``staging_bytes``."""
    return max((staging_bytes + chunk_bytes) * HOST_PARTS // (HOST_PARTS - 1), 2 * staging_bytes)


def tier_mode(text: str | None) -> str | None:
    """What :data:`TIER_FLAG` means: YAML makes a truth value of an ``off`` without quotes, and SGLang a word."""
    return "off" if text == "false" else text


API_KEY_VARIABLE = "HCACHE_API_KEY"
"""Where commands that talk to a server find its API key, if no option gives it."""


def user_cache_dir() -> Path:
    """This user's built helpers and profiles: ``$XDG_CACHE_HOME/sglang-hcache`` or ``~/.cache/sglang-hcache``.

    Raises:
        ConfigError: neither ``$HOME`` nor the system's list of users names a home directory.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sglang-hcache"
    try:
        return Path.home() / ".cache" / "sglang-hcache"
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory to keep built helpers and profiles in; set XDG_CACHE_HOME to a "
            "folder for them"
        ) from None


def profile_dir() -> Path:
    """Where ``hcache profile`` saves what it measured, and servers look for it.

    Raises:
        ConfigError: as :func:`user_cache_dir`.
    """
    return user_cache_dir() / "profiles"


def chosen_c_compiler() -> str | None:
    """The C compiler named in ``$CC``, with its options; None where the user chose none."""
    return os.environ.get("CC", "").strip() or None


def environment_with(
    changes: Mapping[str, str], defaults: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """A copy of this process's environment with ``changes``; values for ``*_PATH`` go in front.

    Args:
        defaults: for variables that are not set.
    """
    environment = {**defaults, **os.environ}
    for name, value in changes.items():
        if name.endswith("_PATH"):
            others = environment.get(name, "").split(os.pathsep)
            value = os.pathsep.join([value, *(other for other in others if other not in ("", value))])
        environment[name] = value
    return environment
