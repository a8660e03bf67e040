"""Which profile counts, and what each layer stores."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from sglang_hcache.core.config import HCacheConfig, profile_dir
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import CHUNK_TOKENS, Method, PlanKind
from sglang_hcache.plan.planner import Split, fastest_restore
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.shapes import ModelShape
from sglang_hcache.plan.stored import best_stored, planned_costs
from sglang_hcache.sglang_plugin.seam.named_profile import named_profile
from sglang_hcache.sglang_plugin.setup.measuring import Bench, installed_versions
from sglang_hcache.store import DiskStore
from sglang_hcache.tier.tiered import DISK

logger = logging.getLogger(__name__)

_WORTH_CHANGING = 1.5
"""Chunks on disk keep their mix unless another one is faster by this factor. With a new mix they are lost: each history
is recomputed once, which takes as long as dozens of restores gain, and two measurements of one disk may differ by more
than a tenth."""


def find_profile(config: HCacheConfig, bench: Bench) -> Profile | None:
    """The profile that the configuration names, a saved one that matches, or a new one.

    Returns:
        None if there is none and the machine cannot be measured.

    Raises:
        ConfigError: the file named is no profile, or of another model; or the new one cannot be saved.
    """
    if config.save_profile is not None:
        if not bench.is_possible:
            raise ConfigError(f"save_profile: {_too_short(bench)}; raise what is the least")
        profile = bench.measure()
        if bench.model.ranks.rank == 0:
            _save(profile, config.save_profile)
        return profile
    if config.profile is not None:
        return _named(config.profile, bench)
    ranks = bench.model.ranks
    found = ranks.from_first(_saved_one(bench) if ranks.rank == 0 else None)
    if found is not None:
        return found
    if bench.is_possible:
        return bench.measure()
    logger.warning("hcache: %s: whatever is stored is restored", _too_short(bench))
    return None


def _saved_one(bench: Bench) -> Profile | None:
    for path in _saved_profiles():
        try:
            profile = Profile.read(path)
        except ConfigError as error:
            logger.warning("hcache: %s; it is not used", error)
            continue
        found = differences(profile, bench.model.shape, bench.machine)
        if not found:
            logger.info("hcache: using the profile %s", path)
            return profile
        if profile.is_of(bench.model.shape):
            logger.info("hcache: the profile %s is not used: %s", path, "; ".join(found))
    return None


def differences(profile: Profile, shape: ModelShape, machine: str) -> list[str]:
    """In what the circumstances of ``profile`` are not the present ones."""
    found = []
    if not profile.is_of(shape):
        found.append(f"it is of the model {profile.model.name}, with other sizes")
    if profile.machine != machine:
        found.append(f"it was made on {profile.machine!r}; this is {machine!r}")
    if dict(profile.versions) != installed_versions():
        found.append("it was made with other versions")
    return found


def mix_on(disk: DiskStore, shape: ModelShape) -> tuple[Method, ...] | None:
    """What layers of the newest chunks on ``disk`` of a model of this ``shape`` store; None: there are none, or hidden
    states are not the smaller ones.
    """
    hidden_bytes, kv_bytes = CHUNK_TOKENS * shape.hidden_row_bytes, CHUNK_TOKENS * shape.kv_row_bytes
    if hidden_bytes >= kv_bytes:
        return None
    methods = {hidden_bytes: Method.HIDDEN, kv_bytes: Method.KV}
    for layout in disk.stats().layouts:
        if len(layout) == shape.num_layers and methods.keys() >= {*layout}:
            return tuple(methods[size] for size in layout)
    return None


def choose_stored(
    config: HCacheConfig, profile: Profile | None, shape: ModelShape, on_disk: tuple[Method, ...] | None
) -> tuple[Method, ...]:
    """What each layer stores. What is on disk (:func:`mix_on`) keeps its mix, as long as that is good enough."""
    layers = shape.num_layers
    if config.method is PlanKind.HIDDEN:
        return (Method.HIDDEN,) * layers
    if config.method is not PlanKind.AUTO:
        return (Method.KV,) * layers
    smaller = Method.HIDDEN if shape.hidden_row_bytes < shape.kv_row_bytes else Method.KV
    best = (smaller,) * layers if profile is None else best_stored(profile)
    if on_disk in (None, best) or config.save_profile is not None:
        return best  # who only measures decides nothing for others
    if profile is None or DISK not in profile.tiers:
        return on_disk  # nobody knows what is best for the disk
    costs = planned_costs(profile)
    slower = fastest_restore(on_disk, costs).total_s / fastest_restore(best, costs).total_s
    if slower <= _WORTH_CHANGING:
        return on_disk
    logger.warning(
        "hcache: %s is %.1f times as fast as %s here: what is stored by %s is not used any more",
        describe(best), slower, describe(on_disk), describe(on_disk),
    )  # fmt: skip
    return best


def describe(methods: Sequence[Method]) -> str:
    """What layers store, for people: ``hidden``, ``kv`` or how many of each."""
    split = Split.of(methods)
    if not split.kv or not split.hidden:
        return str(methods[0])
    return f"{split.hidden} hidden + {split.kv} kv"


def _saved_profiles() -> list[Path]:
    """Files that may hold one; none, with a warning, where nobody can look: the model is loaded by then."""
    try:
        # Not Path.glob: whether that raises or finds nothing depends on the version of Python.
        with os.scandir(profile_dir()) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name.endswith(".json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("hcache: cannot look for saved profiles in %s: %s", error.filename, error.strerror)
    except ConfigError as error:
        logger.warning("hcache: cannot look for saved profiles: %s", error)
    return []


def _named(path: Path, bench: Bench) -> Profile:
    profile = named_profile(path, bench.model.shape)
    if bench.model.ranks.rank == 0:  # directories of other ranks are never those of the profile
        for difference in differences(profile, bench.model.shape, bench.machine):
            logger.warning("hcache: the profile %s is used although %s", path, difference)
    return profile


def _too_short(bench: Bench) -> str:
    return (
        f"passes of {bench.longest} tokens (--chunked-prefill-size, a quarter of the KV pool, or the model's context) "
        "are too short to measure anything"
    )


def _save(profile: Profile, path: Path) -> None:
    try:
        path.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save_profile: cannot write {path}: {error.strerror}") from None
