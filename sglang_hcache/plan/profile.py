"""A profile: what a layer of one model costs on one machine, measured or counted, as functions of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import sglang_hcache
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.costs import (
    Hardware,
    LayerCosts,
    check_contention,
    check_range,
    projection_flops,
    recompute_flops,
)
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.shapes import FFNKind, ModelShape

PROFILE_FORMAT = 1
"""Version of the JSON form. A file with another number is refused."""

_T = TypeVar("_T")


class ProfileSource(StrEnum):
    """Where the numbers come from. Values stand in files: never rename one."""

    MEASURED = "measured"
    ANALYTIC = "analytic"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCurves:
    """Reading one layer from one tier. Linear: bytes over bandwidth.

    Raises:
        ValueError: a curve with a squared term or of zeros, or a contention that is no share.
    """

    hidden: CostCurve
    kv: CostCurve
    contention: float = 0.0
    """:attr:`LayerCosts.contention` of reading from this tier."""

    def __post_init__(self) -> None:
        _check_linear("hidden", self.hidden)
        _check_linear("kv", self.kv)
        _check_costs("hidden", self.hidden)
        _check_costs("kv", self.kv)
        check_contention(self.contention)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCurves:
    """Computing one layer. Projecting and writing are linear, recomputing has attention's squared term.

    Raises:
        ValueError: a squared term where none belongs, or recomputing for nothing.
    """

    hidden: CostCurve
    """Project hidden states to K and V and write both into the pool."""
    kv: CostCurve
    """Write K and V that were read into the pool."""
    recompute: CostCurve
    """Run the whole layer."""

    def __post_init__(self) -> None:
        _check_linear("hidden", self.hidden)
        _check_linear("kv", self.kv)
        _check_costs("recompute", self.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of one layer of ``model`` on ``machine``.

    Raises:
        ValueError: no tier, or a range of lengths that is empty.
    """

    source: ProfileSource
    model: ModelShape
    machine: str
    """What the numbers belong to: one of another machine is not used unless it is named."""
    tiers: Mapping[str, TierCurves]
    """Name of a tier (``host``, ``disk``) -> reading from it."""
    compute: ComputeCurves
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a package -> its version when the profile was made."""
    token_range: tuple[int, int] | None = None
    """Shortest and longest length that all curves were measured at; None: they hold everywhere."""

    def __post_init__(self) -> None:
        if not isinstance(self.machine, str):
            raise ValueError(f"machine must be a text, got {self.machine!r}")
        if not self.tiers:
            raise ValueError("tiers must name at least one tier")
        if self.token_range is not None and not 1 <= self.token_range[0] <= self.token_range[1]:
            raise ValueError(f"token_range must be [shortest, longest], got {list(self.token_range)}")

    def is_of(self, model: ModelShape) -> bool:
        """Whether it is of a model with all the sizes of ``model``; names may differ."""
        return replace(self.model, name=model.name) == model

    def costs(self, tokens: Mapping[str, int], start: int = 0) -> LayerCosts:
        """What one layer costs when ``tokens`` come back.

        Args:
            tokens: tier -> how many of the tokens are there.
            start: position of the first token; those before it are on the device already.

        Raises:
            ValueError: no tokens at all, a negative number, or a tier that the profile does not know.
        """
        parts = self._parts(tokens)
        total = sum(parts.values())
        check_range(total, start)
        io_kv_s = {tier: self.tiers[tier].kv.seconds(count) for tier, count in parts.items()}
        contended_s = sum(seconds * self.tiers[tier].contention for tier, seconds in io_kv_s.items())
        return LayerCosts(
            io_hidden_s=sum(self.tiers[tier].hidden.seconds(count) for tier, count in parts.items()),
            io_kv_s=sum(io_kv_s.values()),
            compute_hidden_s=self.compute.hidden.seconds(total),
            compute_kv_s=self.compute.kv.seconds(total),
            compute_recompute_s=self.compute.recompute.seconds(total, start),
            contention=min(1.0, contended_s / sum(io_kv_s.values())) if contended_s else 0.0,
        )

    def _parts(self, tokens: Mapping[str, int]) -> dict[str, int]:
        for tier, count in tokens.items():
            if tier not in self.tiers:
                raise ValueError(f"tier {tier!r} is not in the profile; it has {', '.join(self.tiers)}")
            if count < 0:
                raise ValueError(f"tier {tier}: {count} tokens")
        return {tier: count for tier, count in tokens.items() if count}

    def to_json(self) -> str:
        """The profile as text; :meth:`from_json` makes an equal one of it."""
        data = {"format": PROFILE_FORMAT, **asdict(self)}
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path, named_by: str = "") -> Profile:
        """The profile in a file.

        Args:
            named_by: the flag that named the file, for messages; empty: none did.

        Raises:
            ConfigError: it cannot be read, or is none.
        """
        prefix = f"{named_by}: " if named_by else ""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{prefix}cannot read {path}: {error.strerror}") from None
        except ValueError as error:  # JSON and UTF-8 errors are some, too
            raise ConfigError(f"{prefix}{path} is no profile that we can read: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another format, or a value that is missing, unknown or not allowed. The message
                says where.
        """
        try:
            return cls._from_data(json.loads(text))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    @classmethod
    def _from_data(cls, data: Any) -> Profile:
        if not isinstance(data, dict) or data.get("format") != PROFILE_FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise ValueError(f"format must be {PROFILE_FORMAT}, got {found!r}: not a profile of this version")
        del data["format"]
        data["source"] = ProfileSource(str(data.get("source")))
        data["model"] = _build(ModelShape, "model", _with_ffn_kind(data.get("model")))
        tiers = _object("tiers", data.get("tiers"))
        data["tiers"] = {name: _curves(TierCurves, f"tiers.{name}", tier) for name, tier in tiers.items()}
        data["compute"] = _curves(ComputeCurves, "compute", data.get("compute"))
        data["versions"] = {
            name: str(text) for name, text in _object("versions", data.get("versions", {})).items()
        }
        if data.get("token_range") is not None:
            data["token_range"] = _token_range(data["token_range"])
        return _build(cls, "profile", data)


def analytic_profile(
    shape: ModelShape,
    hardware: Hardware,
    tier: str = "disk",
    machine: str = "analytic",
    *,
    projects: bool = True,
) -> Profile:
    """A profile that is counted, not measured: the formulas of [HCache §3.2] as curves.

    Every method also writes K and V into the pool, which the paper leaves out.

    Args:
        projects: whether K and V are projected from hidden states. Where they are not, that costs as much as running
            all layers, so no plan but the one of hidden states alone has it: as in a profile that is measured there.
    """
    write_s = shape.kv_row_bytes / hardware.kv_write_bytes_per_s
    linear_flops = recompute_flops(shape, 1, 0, factor=0.0)
    hidden_flops = projection_flops(shape, 1) if projects else shape.num_layers * linear_flops
    return Profile(
        source=ProfileSource.ANALYTIC,
        model=shape,
        machine=machine,
        tiers={
            tier: TierCurves(
                hidden=_read_curve(shape.hidden_row_bytes, hardware),
                kv=_read_curve(shape.kv_row_bytes, hardware),
            )
        },
        compute=ComputeCurves(
            hidden=CostCurve(per_token_s=hidden_flops / hardware.flops + write_s),
            kv=CostCurve(per_token_s=write_s),
            recompute=CostCurve(
                per_token_s=linear_flops / hardware.flops + write_s,
                per_token_squared_s=hardware.attention_factor * shape.attention_size / hardware.flops,
            ),
        ),
        versions={"sglang-hcache": sglang_hcache.__version__},
    )


def _read_curve(row_bytes: int, hardware: Hardware) -> CostCurve:
    return CostCurve(fixed_s=hardware.io_fixed_s, per_token_s=row_bytes / hardware.io_bytes_per_s)


def _check_linear(name: str, curve: CostCurve) -> None:
    if curve.per_token_squared_s:
        raise ValueError(f"{name}: per_token_squared_s must be 0, only recomputing has a squared term")


def _check_costs(name: str, curve: CostCurve) -> None:
    """What things really take is compared with what the curve says."""
    if not curve.seconds(1):
        raise ValueError(f"{name}: it must take some time, and all numbers are 0")


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r}")
    return value


def _build(kind: type[_T], where: str, value: Any) -> _T:
    """``kind(**value)``, with every problem named."""
    data = _object(where, value)
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}")
    try:
        return kind(**data)
    except (OverflowError, TypeError, ValueError) as error:  # TypeError: a field without default is missing
        raise ValueError(f"{where}: {error}") from None


def _with_ffn_kind(value: Any) -> dict[str, Any]:
    data = _object("model", value)
    return {**data, "ffn": FFNKind(str(data.get("ffn")))}


def _curves(kind: type[_T], where: str, value: Any) -> _T:
    values = {
        name: value if name == "contention" else _build(CostCurve, f"{where}.{name}", value)
        for name, value in _object(where, value).items()
    }
    return _build(kind, where, values)


def _token_range(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
        raise ValueError(f"token_range must be [shortest, longest], got {value!r}")
    return value[0], value[1]
