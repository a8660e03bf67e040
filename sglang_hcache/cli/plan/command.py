"""``hcache plan``: what the planner would do for a model on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_hcache.cli.options import AsJson, parsed
from sglang_hcache.cli.paths import named_path
from sglang_hcache.cli.plan.model import NAMES
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.units import parse_duration, parse_size

if TYPE_CHECKING:  # the rest is imported where it is used, to keep `hcache --help` quick
    from sglang_hcache.cli.plan.capacity import Sizing
    from sglang_hcache.cli.plan.model import PlannedModel
    from sglang_hcache.cli.plan.report import PlanReport
    from sglang_hcache.core.layout import PlanKind
    from sglang_hcache.plan.profile import Profile

_TOKENS = 4096
_KEEP = "10m"
_SIZED = ("auto", "hidden", "kv")
"""Methods that store something whatever the machine's rates are."""
_MOST = 10**9
"""Tokens, layers, GB/s and TFLOP/s; the slowest rates are as far below 1. Times that follow from others are none."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"A model folder, its config.json, or one of {NAMES}. A profile names its model itself.",
        show_default=False,
    ),
]
IoRate = Annotated[
    float | None,
    typer.Option(
        metavar="GB/S",
        help="Read throughput of the tier, all drives together, in 10^9 bytes per second.",
    ),
]
ComputeRate = Annotated[
    float | None,
    typer.Option(
        metavar="TFLOP/S",
        help="Throughput of large matrix products in the model's dtype: measured, not the data sheet's peak.",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=named_path,
        help="Measured costs, from `hcache profile`, instead of MODEL, --io-gbps and --tflops.",
    ),
]
TierName = Annotated[
    str, typer.Option(help="Tier of the profile to restore from. Default: its only one, or disk.")
]
Tokens = Annotated[
    int | None, typer.Option(help=f"Length of the restored history, in tokens. Default: {_TOKENS}.")
]
MethodName = Annotated[
    str,
    typer.Option(
        help="Method whose plan is shown in full: auto, hidden, kv, hybrid or recompute. auto may mix them all."
    ),
]
DtypeName = Annotated[
    str,
    typer.Option(
        help="float32, float16 or bfloat16. Default, as in SGLang: the dtype that MODEL names, or 16 bits if that is "
        "float32."
    ),
]
KVCacheDtypeName = Annotated[
    str,
    typer.Option(
        help="As for SGLang's flag: auto, fp8_e4m3 or fp8_e5m2. With FP8 no hidden states are stored."
    ),
]
PassTokens = Annotated[
    int,
    typer.Option(
        help="Tokens of the largest prefill pass: SGLang's --chunked-prefill-size. Used to size host memory."
    ),
]
PoolTokens = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        help="Tokens of SGLang's KV pool, max_total_num_tokens in its log. Also prints the host memory for twice as "
        "many: with less than once, hardly anything is restored from host memory.",
    ),
]
TokensPerS = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="New tokens per second that the server computes, prompts and answers together, excluding what comes from "
        "a cache. Also prints the size and wear of the disk tier.",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help=f"With --tokens-per-s: how long to keep them: your users' longest pause. Default: {_KEEP}.",
    ),
]
DriveSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="With --tokens-per-s: capacity of all drives together. Also prints drive writes per day.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=named_path,
        help="Also draw the plan's two timelines (needs matplotlib).",
    ),
]


def plan(
    model: Model = "",
    io_gbps: IoRate = None,
    tflops: ComputeRate = None,
    profile: ProfileFile = None,
    tier: TierName = "",
    tokens: Tokens = None,
    method: MethodName = "auto",
    dtype: DtypeName = "",
    kv_cache_dtype: KVCacheDtypeName = "auto",
    pass_tokens: PassTokens = 8192,
    pool_tokens: PoolTokens = None,
    tokens_per_s: TokensPerS = None,
    keep: Keep = None,
    drive_size: DriveSize = "",
    as_json: AsJson = False,
    png: Picture = None,
) -> None:
    """Predict how fast a history is restored, by which method for each layer, and whether restoring pays off.

    A layer is restored in one of three ways. Its *hidden states* are read and projected to K and V. Or its *K and V*
    are read as they are: more bytes (fewer with grouped-query attention), nothing to compute. Or it is *recomputed*
    from the tokens: nothing to read, the most to compute. One layer is read while another is computed, so the best mix
    keeps both the disk and the processor busy until the end.

    `hcache plan llama2-7b --io-gbps 26 --tflops 197` calculates the costs from the model's sizes and two rates of the
    machine. `hcache profile --model-path MODEL` measures them on this machine; `--profile FILE` uses what it saved.

    This command only predicts. The last lines say what a server with `--hcache-method auto` does with these costs: it
    stores the mix of hidden states and K and V that is best for 4,096 tokens, and for each restore it chooses how many
    of the first layers to recompute.

    `hcache plan llama2-7b`, without rates, prints only what a token takes and how much host memory a GPU server needs
    at least, for the passes of overlap scheduling, SGLang's default. `--pool-tokens 800000` adds how much it needs to
    find there what the KV pool drops. `--tokens-per-s 2000 --keep 10m --drive-size 4TB`
    adds the size that the disk tier needs and how fast it wears its drives.

    With quantized weights (`quantization_config` in config.json) or an FP8 KV cache (`--kv-cache-dtype`), a server
    stores only K and V, and plans assume the same.
    """
    from sglang_hcache.cli.plan.report import make_report
    from sglang_hcache.core.layout import PlanKind

    kind = _kind(method)
    _check_between(1, _MOST, tokens=tokens, pass_tokens=pass_tokens, pool_tokens=pool_tokens)
    _check_between(1 / _MOST, _MOST, io_gbps=io_gbps, tflops=tflops, tokens_per_s=tokens_per_s)
    sizing = _sizing(pass_tokens, pool_tokens, tokens_per_s, keep, drive_size)
    planned = _model(model, dtype, kv_cache_dtype)
    why_not_hidden = None if planned is None else planned.why_not_hidden
    if kind is PlanKind.HIDDEN and why_not_hidden is not None:
        raise ConfigError(f"--method: hidden is not allowed here: {why_not_hidden}; use auto or kv")
    asking = _asking_for_times(kind, tier, tokens, png)
    if planned is not None and not any((asking, io_gbps, tflops, profile)):
        _show_sizes(planned, kind, sizing, as_json)
        return
    costs = _profile(planned, io_gbps, tflops, profile, asking)
    report = make_report(costs, _tier(costs, tier), tokens or _TOKENS, kind, why_not_hidden, sizing)
    _show_plan(report, png, as_json)


def _show_plan(report: PlanReport, png: Path | None, as_json: bool) -> None:
    from sglang_hcache.cli.report import Report

    if png is not None:
        _draw(png, report)
    Report(report.data(), report.parts()).show(as_json=as_json)
    if png is not None and not as_json:
        print(f"wrote {png}")


def _show_sizes(model: PlannedModel, kind: PlanKind, sizing: Sizing, as_json: bool) -> None:
    from sglang_hcache.cli.plan.sizes import SizesReport
    from sglang_hcache.cli.report import Report
    from sglang_hcache.core.layout import Method, PlanKind

    allowed = (Method.KV,) if model.why_not_hidden is not None else (Method.HIDDEN, Method.KV)
    methods = tuple(method for method in allowed if kind in (PlanKind.AUTO, PlanKind(method)))
    report = SizesReport(model.shape, methods, model.why_not_hidden, sizing)
    Report(report.data(), report.parts()).show(as_json=as_json)


def _kind(method: str) -> PlanKind:
    from sglang_hcache.core.layout import PlanKind

    try:
        return PlanKind(method)
    except ValueError:
        raise ConfigError(f"--method: {method!r} is not allowed; allowed: {', '.join(PlanKind)}") from None


def _check_between(least: float, most: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: {value} is not allowed; give a number between {least:g} and {most:g}")


def _sizing(
    pass_tokens: int, pool_tokens: int | None, tokens_per_s: float | None, keep: str | None, drive_size: str
) -> Sizing:
    from sglang_hcache.cli.plan.capacity import Sizing

    keep_s = parsed("--keep", parse_duration, _KEEP if keep is None else keep)
    drive_bytes = parsed("--drive-size", parse_size, drive_size) if drive_size else None
    if drive_bytes == 0:
        raise ConfigError("--drive-size: 0 is not allowed; leave it out, or give the drives' capacity")
    for flag, value in (("--keep", keep), ("--drive-size", drive_bytes)):
        if value is not None and tokens_per_s is None:
            raise ConfigError(
                f"{flag}: it counts only with --tokens-per-s; give that as well, or leave it out"
            )
    return Sizing(pass_tokens, pool_tokens, tokens_per_s, keep_s, drive_bytes)


def _model(model: str, dtype: str, kv_cache_dtype: str) -> PlannedModel | None:
    """None: no MODEL was given."""
    from sglang_hcache.cli.plan.model import PlannedModel

    if model:
        return PlannedModel.of(model, dtype, kv_cache_dtype)
    for flag, value in (("--dtype", dtype), ("--kv-cache-dtype", kv_cache_dtype)):
        if value not in ("", "auto"):
            raise ConfigError(f"{flag}: {value} needs a MODEL; a profile names its dtypes itself")
    return None


def _asking_for_times(kind: PlanKind, tier: str, tokens: int | None, png: Path | None) -> str | None:
    """The first argument, of those given, that makes no sense without the machine's rates."""
    given = ((f"--method {kind}", kind not in _SIZED), ("--tier", tier), ("--tokens", tokens), ("--png", png))
    return next((flag for flag, is_given in given if is_given), None)


def _profile(
    model: PlannedModel | None,
    io_gbps: float | None,
    tflops: float | None,
    path: Path | None,
    asking: str | None,
) -> Profile:
    """Measured costs from the file, or costs counted from two rates.

    Args:
        asking: an argument that needs them.

    Raises:
        ConfigError: neither or both ways given, no MODEL, a wrong file, or a profile of another model.
    """
    from sglang_hcache.plan.costs import Hardware
    from sglang_hcache.plan.profile import Profile, analytic_profile

    if path is not None:
        if io_gbps is not None or tflops is not None:
            raise ConfigError("--profile: it takes the place of --io-gbps and --tflops; leave them out")
        if model is None:
            return Profile.read(path, "--profile")
        return Profile.read_of(model.shape, path, "--profile", "; leave MODEL out")
    if model is None:
        raise ConfigError(
            f"MODEL is missing; name a model folder, a config.json or one of {NAMES}. `hcache plan llama2-7b` prints "
            "what a token takes; with --io-gbps and --tflops, or --profile FILE, it predicts times"
        )
    if io_gbps is None and tflops is None:
        raise ConfigError(f"{asking} needs --io-gbps and --tflops, or --profile FILE")
    if io_gbps is None or tflops is None:
        missing = "--io-gbps" if io_gbps is None else "--tflops"
        raise ConfigError(
            f"{missing} is missing; give both rates, as in `hcache plan llama2-7b --io-gbps 26 --tflops 197`, or "
            "--profile FILE"
        )
    hardware = Hardware(flops=tflops * 1e12, io_bytes_per_s=io_gbps * 1e9)
    machine = f"{io_gbps:g} GB/s of I/O, {tflops:g} TFLOP/s; costs are counted, not measured"
    projects = model.why_not_hidden is None
    try:
        return analytic_profile(model.shape, hardware, tier="disk", machine=machine, projects=projects)
    except ValueError as error:
        raise ConfigError(f"--io-gbps, --tflops: too slow for this model: {error}") from None


def _tier(profile: Profile, tier: str) -> str:
    tiers = ", ".join(profile.tiers)
    if tier:
        if tier not in profile.tiers:
            raise ConfigError(f"--tier: {tier!r} is not in the profile; it has {tiers}")
        return tier
    if len(profile.tiers) == 1:
        return next(iter(profile.tiers))
    if "disk" not in profile.tiers:
        raise ConfigError(f"--tier: say which one of the profile's is read: {tiers}")
    return "disk"


def _draw(path: Path, report: PlanReport) -> None:
    try:
        from sglang_hcache.cli.plan.picture import draw
    except ImportError:
        raise ConfigError(
            "--png: drawing needs matplotlib (the extra `plots`); install it with: pip install matplotlib"
        ) from None
    try:
        draw(path, report)
    except OSError as error:
        raise ConfigError(f"--png: cannot write {path}: {error.strerror}") from None
