"""A profile: what a layer of one model costs on one machine, measured or counted, as functions of tokens."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

import sglang_hcache
from sglang_hcache.core.config import reason_of
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.costs import (
    Hardware,
    LayerCosts,
    check_contention,
    check_range,
    linear_flops,
    projection_flops,
)
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.shapes import ModelShape, printable

PROFILE_FORMAT = 1
"""Version of the JSON form. A file with another number is refused."""


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
        ValueError: no tier, a range of lengths that is empty, or a name that cannot be printed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # also of what it is made of

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
    """Shortest and longest forward pass that was measured; None: the curves hold everywhere."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("tiers must name at least one tier")
        for name in (self.machine, *self.tiers):
            if not name.isprintable():
                raise ValueError(f"machine and tiers must have printable names, got {reprlib.repr(name)}")
        if self.token_range is not None and not 1 <= self.token_range[0] <= self.token_range[1]:
            raise ValueError(f"token_range must be [shortest, longest], got {list(self.token_range)}")

    def is_of(self, model: ModelShape) -> bool:
        """Whether it is of a model with all the sizes of ``model``; names may differ."""
        return replace(self.model, name=model.name) == model

    def costs(
        self, tokens: Mapping[str, int], start: int = 0, slower: Mapping[str, float] = MappingProxyType({})
    ) -> LayerCosts:
        """What one layer costs when ``tokens`` come back.

        Args:
            tokens: tier -> how many of the tokens are there.
            start: position of the first token; those before it are on the device already.
            slower: tier -> by which factor reading from it takes longer than the profile says; 1 where it is missing.

        Raises:
            ValueError: no tokens at all, a negative number, or a tier that the profile does not know.
        """
        parts = self._parts(tokens)
        total = sum(parts.values())
        check_range(total, start)
        io_kv_s = {tier: self.tiers[tier].kv.seconds(count) for tier, count in parts.items()}
        io_hidden_s = {tier: self.tiers[tier].hidden.seconds(count) for tier, count in parts.items()}
        contended_s = sum(seconds * self.tiers[tier].contention for tier, seconds in io_kv_s.items())
        return LayerCosts(
            io_hidden_s=sum(slower.get(tier, 1.0) * seconds for tier, seconds in io_hidden_s.items()),
            io_kv_s=sum(slower.get(tier, 1.0) * seconds for tier, seconds in io_kv_s.items()),
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
    def read_of(cls, model: ModelShape, path: Path, named_by: str, hint: str) -> Profile:
        """As :meth:`read`, of a profile that must be of ``model``.

        Args:
            hint: the end of the message if it is not.

        Raises:
            ConfigError: it cannot be read, is none, or is of another model.
        """
        found = cls.read(path, named_by)
        if not found.is_of(model):
            raise ConfigError(
                f"{named_by}: {path} is of the model {found.model.name}, which has other sizes than {model.name}{hint}"
            )
        return found

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another format, or a value that is missing, unknown or not allowed. The message
                says where.
        """
        try:
            data = json.loads(text)
            found = data.pop("format", None) if isinstance(data, dict) else None
            if found != PROFILE_FORMAT:
                raise ValueError(
                    f"format must be {PROFILE_FORMAT}, got {found!r}: not a profile of this version"
                )
            return _LOADER.validate_json(json.dumps(data))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except ValidationError as error:
            raise ValueError("; ".join(_explain(dict(item)) for item in error.errors())) from None


_LOADER = TypeAdapter(Profile)


def analytic_profile(
    shape: ModelShape,
    hardware: Hardware,
    tier: str = "disk",
    machine: str = "analytic",
    *,
    projects: bool = True,
) -> Profile:
    """A profile that is counted, not measured: the formulas of [HCache §3.2] as curves.

    As in the paper, attention computes N²·D FLOPs besides its matrices, and writing K and V takes no time.

    Args:
        projects: whether K and V are projected from hidden states. Where they are not, that costs as much as running
            all layers, so no plan but the one of hidden states alone has it: as in a profile that is measured there.
    """
    layer_flops = linear_flops(shape)
    hidden_flops = projection_flops(shape) if projects else shape.num_layers * layer_flops
    return Profile(
        source=ProfileSource.ANALYTIC,
        model=shape,
        machine=machine,
        tiers={
            tier: TierCurves(
                hidden=CostCurve(per_token_s=shape.hidden_row_bytes / hardware.io_bytes_per_s),
                kv=CostCurve(per_token_s=shape.kv_row_bytes / hardware.io_bytes_per_s),
            )
        },
        compute=ComputeCurves(
            hidden=CostCurve(per_token_s=hidden_flops / hardware.flops),
            kv=CostCurve(per_token_s=0.0),
            recompute=CostCurve(
                per_token_s=layer_flops / hardware.flops,
                per_token_squared_s=shape.attention_size / hardware.flops,
            ),
        ),
        versions={"sglang-hcache": sglang_hcache.__version__},
    )


def _check_linear(name: str, curve: CostCurve) -> None:
    if curve.per_token_squared_s:
        raise ValueError(f"{name}: per_token_squared_s must be 0, only recomputing has a squared term")


def _check_costs(name: str, curve: CostCurve) -> None:
    """What things really take is compared with what the curve says."""
    if not curve.seconds(1):
        raise ValueError(f"{name}: it must take some time, and all numbers are 0")


def _explain(error: dict[str, Any]) -> str:
    where = printable(".".join(map(str, error["loc"])))
    if error["type"] in ("missing", "unexpected_keyword_argument"):
        return f"{where} is {'missing' if error['type'] == 'missing' else 'unknown'}"
    reason = reason_of(error)
    if error["type"] != "value_error":  # ours name the value
        reason += f", got {reprlib.repr(error['input'])}"
    return f"{where}: {reason}" if where else reason
