"""``hcache profile``: measure once what restoring and recomputing cost here, for all servers to come."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_hcache.cli.options import AsJson
from sglang_hcache.cli.paths import given_path, named_path
from sglang_hcache.cli.server import tier_flags
from sglang_hcache.cli.server.arguments import arguments_in_file, values_of
from sglang_hcache.core.config import TIER_FLAG, HCacheConfig, flag_of, profile_dir, tier_mode
from sglang_hcache.core.errors import ConfigError

if TYPE_CHECKING:  # the rest is imported where it is used, to keep `hcache --help` quick
    from sglang_hcache.plan.profile import Profile

ModelPath = Annotated[
    str,
    typer.Option(
        "--model-path",
        "--model",
        metavar="MODEL",
        help="The model, as for the server: a folder, or a name that SGLang can load.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=named_path,
        help="Where to save the profile; pass it to servers with --hcache-profile FILE. "
        "Default: where servers look by themselves, ~/.cache/sglang-hcache/profiles.",
        show_default=False,
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        metavar="N",
        help="Maximum time for each measurement: three computations, two reads of each tier, and reading the disk "
        "while restoring. Up to 60.",
    ),
]
Passed = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGUMENTS",
        help="Other arguments of SGLang and of the tier (--hcache-*), as for `hcache serve`. --hcache-dirs names the "
        "disks.",
        show_default=False,
    ),
]

_POOL_TOKENS = 4 * 8192
"""The longest prefix that is measured may take a quarter of the KV pool; a larger pool only takes time to allocate."""


def profile(
    arguments: Passed = None,
    model_path: ModelPath = "",
    out: Out = None,
    seconds: Seconds = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of restoring and recomputing for a model on this machine, and save it.

    A server predicts for each prefix whether restoring it is faster than recomputing it and, with
    `--hcache-method auto`, which layers to restore from hidden states, from K and V, or by recomputing. Without a
    profile it measures for a few seconds at each startup. This command measures longer, so that servers start sooner
    and predict better. Run it while nothing else uses the machine.

    It starts the real server, has it time forward passes, projections, writes of K and V and reads of each tier at
    several lengths, stops it and prints the fitted costs. `hcache plan --profile FILE` shows what a server does with
    them. Pass the arguments that you will serve with, for SGLang and for `hcache serve`:

    `hcache profile --model-path MODEL --hcache-dirs /mnt/nvme0/hcache`

    All methods are measured, whatever `--hcache-method` says.

    Servers use the saved profile if model sizes, dtype, machine, versions, directories, attention backend,
    quantization and `--tp-size` are the same; a new measurement replaces it. Without `--hcache-dirs` only host memory
    is measured. No server may use the directories during the measurement. It writes up to 128 MiB there and deletes
    them at the end. An existing disk tier keeps its sizes unless you give others.
    """
    from sglang_hcache.cli.profile.report import ProfileReport
    from sglang_hcache.cli.profile.run import measure
    from sglang_hcache.cli.server.kept_sizes import with_sizes_of_store

    if not model_path:
        raise ConfigError("--model-path is missing: name the model that you will serve")
    tier_flags.check_model([model_path])
    tier_flags.check(arguments or [])
    # A profile there is not used, as none in the file of --hcache-config is.
    in_file = [one for one in arguments_in_file(arguments or []) if not one.startswith("--hcache-profile=")]
    settings = _server_settings([*in_file, *(arguments or [])], seconds)
    config = HCacheConfig.from_settings(settings)
    settings = with_sizes_of_store(settings, config.dirs)
    HCacheConfig.from_settings(settings)  # a segment_size that is given may not fit
    target = profile_dir() if out is None else given_path("--out", out)
    _check_target(target, is_folder=out is None)
    command = _command(model_path, arguments or [], in_file)
    measured = measure(command, settings)
    path = target if out is not None else target / file_name(measured.profile)
    _save(measured.profile, path, replaces_others=out is None)
    report = ProfileReport(
        measured=measured, path=path, has_dirs=bool(config.dirs), is_found_by_servers=out is None
    )
    report.show(as_json=as_json)


def _server_settings(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Settings of the server that measures.

    The file of ``--hcache-config`` is read, flags win over it. ``method`` becomes auto, which a line on standard error
    says if it was not: with another one the server measures only a part of what a profile has.

    Raises:
        ConfigError: the file cannot be read, or something is given that makes no sense here.
    """
    from sglang_hcache.sglang_plugin.launch.settings_file import settings_of

    given, _ = tier_flags.parse(arguments)
    mode = tier_mode(given.hierarchical_cache)
    if mode not in (None, "hcache"):
        raise ConfigError(f"{TIER_FLAG}: {mode!r} is not allowed; the tier is what is measured")
    if given.hcache_profile is not None:
        raise ConfigError(
            "--hcache-profile: leave it out; this command measures anew (--out FILE saves there)"
        )
    settings = settings_of(given)
    settings.pop("profile", None)
    if (method := settings.get("method", "auto")) != "auto":
        print(
            f"hcache: --hcache-method {method}: measured as auto, for a profile has the costs of all methods",
            file=sys.stderr,
        )
    settings["method"] = "auto"
    if not 0 < seconds <= 60:
        raise ConfigError(f"--seconds: {seconds:g} is not allowed; a number above 0, at most 60")
    settings["measure_s"] = seconds
    return settings


def _command(model_path: str, arguments: Sequence[str], in_file: Sequence[str]) -> list[str]:
    """SGLang's arguments; the tier's own are in the settings."""
    _, rest = tier_flags.parse(arguments)
    pool = [] if values_of(in_file, "--max-total-tokens") else ["--max-total-tokens", str(_POOL_TOKENS)]
    # At the end, to win over SGLang's own file and an abbreviated flag.
    return ["--model-path", model_path, *pool, *rest, flag_of("method"), "auto"]


def file_name(profile: Profile) -> str:
    """The model's name, for people, and 8 hex digits that are the same for the same circumstances."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", profile.model.name).strip("-.")[:60]
    return f"{name or 'model'}-{_identity(profile)}.json"


def _identity(profile: Profile) -> str:
    """A digest of all that a server compares."""
    sizes = {field: value for field, value in asdict(profile.model).items() if field != "name"}
    text = json.dumps([sizes, profile.machine, dict(profile.versions)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _check_target(target: Path, *, is_folder: bool) -> None:
    """Before a minute is spent on measuring.

    Raises:
        ConfigError: nothing can be saved there.
    """
    if not is_folder and target.is_dir():
        raise ConfigError(f"--out: {target} is a folder; name a file")
    # Streams of a process belong to others, wherever they lead.
    is_stream = str(target.parent) in ("/dev", "/dev/fd") or target.is_relative_to("/proc")
    folder = target if is_folder else Path(os.path.realpath(target)).parent
    with _saving(target):
        if is_stream or (target.exists() and not (is_folder or target.is_file())):
            raise ConfigError(
                f"--out: {target} is a stream, a pipe or a device; name a file (--json prints the profile)"
            )
        if is_folder:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _save(profile: Profile, path: Path, *, replaces_others: bool) -> None:
    with _saving(path):
        place = Path(os.path.realpath(path))  # a link stays
        with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
            part = Path(scratch) / place.name
            part.write_text(profile.to_json(), encoding="utf-8")
            os.replace(part, place)  # whole or not at all: a server may be looking
        if replaces_others:  # measured under another name of the model
            for other in path.parent.glob(f"*-{_identity(profile)}.json"):
                if other != path:
                    other.unlink(missing_ok=True)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from None
