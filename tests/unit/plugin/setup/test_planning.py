"""Which profile counts, and what is stored by it."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sglang_hcache.cli.plan import server as plan_server
from sglang_hcache.core.config import HCacheConfig, profile_dir
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.core.layout import Method
from sglang_hcache.core.observer import Counters
from sglang_hcache.plan.planner import Split
from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.shapes import NAMED_SHAPES, ModelShape
from sglang_hcache.sglang_plugin.seam.ranks import Alone
from sglang_hcache.sglang_plugin.setup.measuring import Bench, installed_versions
from sglang_hcache.sglang_plugin.setup.planning import choose_stored, describe, find_profile, mix_on
from sglang_hcache.store import DiskStore, Run
from sglang_hcache.store.config import SCRATCH_NAMESPACE
from sglang_hcache.testing.stored_chunks import small_config
from tests.made_profiles import made_profile, reads

MHA = replace(NAMED_SHAPES["llama2-7b"], num_layers=8)
GQA = replace(NAMED_SHAPES["llama3-8b"], num_layers=8)
MACHINE = "this machine; /disk"
HIDDEN, KV = Method.HIDDEN, Method.KV


def profile_of(
    shape: ModelShape = MHA,
    *,
    hidden: float = 4,
    kv: float = 8,
    project: float = 6,
    run: float = 100,
    tiers: tuple[str, ...] = ("host", "disk"),
) -> Profile:
    """Microseconds a token."""
    return made_profile(
        shape,
        dict.fromkeys(tiers, reads(hidden * 1e-6, kv * 1e-6)),
        project=project * 1e-6,
        run=run * 1e-6,
        machine=MACHINE,
        versions=installed_versions(),
    )


@dataclass
class StandIn:
    """What :func:`find_profile` needs of a bench; counts what it measures."""

    shape: ModelShape = MHA
    machine: str = MACHINE
    longest: int = 4096
    is_possible: bool = True
    measured: int = 0

    ranks: Alone = field(default_factory=Alone)

    @property
    def model(self) -> StandIn:
        return self

    def measure(self) -> Profile:
        self.measured += 1
        return profile_of(self.shape, run=1000)


def find(bench: StandIn, **settings: Any) -> Profile | None:
    return find_profile(HCacheConfig.from_settings(settings), cast(Bench, bench))


def leave_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of its own."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of saved profiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile_dir().mkdir(parents=True)
    return profile_dir()


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[[], DiskStore]]:
    """Opens the same store again, as a new server does; the one before is closed."""
    opened: list[DiskStore] = []

    def open_() -> DiskStore:
        for store in opened:
            store.close()
        opened.append(DiskStore.open(small_config(tmp_path), Counters()))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


# -- profiles ------------------------------------------------------------------------------------


def test_a_saved_profile_that_matches_is_used(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile, bench = profile_of(replace(MHA, name="another name")), StandIn()
    (saved / "a.json").write_text(profile.to_json())
    with caplog.at_level(logging.INFO):
        assert find(bench) == profile
    assert not bench.measured
    assert f"hcache: using the profile {saved / 'a.json'}" in caplog.messages


@pytest.mark.parametrize(
    "change",
    [
        {"model": replace(MHA, num_layers=9)},
        {"machine": "this machine; no disk tier"},
        {"versions": installed_versions() | {"torch": "1.0"}},
        {"versions": {}},
    ],
    ids=["sizes", "machine", "version", "no versions"],
)
def test_a_saved_profile_of_other_circumstances_is_not_used(saved: Path, change: dict[str, Any]) -> None:
    other, bench = replace(profile_of(), **change), StandIn()
    (saved / "a.json").write_text(other.to_json())
    assert find(bench) != other
    assert bench.measured == 1
    (saved / "b.json").write_text(profile_of().to_json())
    assert find(bench) == profile_of()
    assert bench.measured == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', "\x00", "[" * 100_000])
def test_a_broken_file_is_skipped_with_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (saved / "a.json").write_text(text)
    (saved / "b.json").write_text(profile_of().to_json())
    assert find(StandIn()) == profile_of()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(saved / "a.json") in warning.getMessage()
    assert warning.getMessage().endswith("it is not used")


def test_without_a_profile_the_machine_is_measured(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find(StandIn()) == StandIn().measure()
    saved.rmdir()
    assert find(StandIn()) == StandIn().measure()
    assert find(StandIn(is_possible=False, longest=64)) is None
    assert "passes of 64 tokens" in caplog.text


def test_a_cache_folder_that_is_not_this_users_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is loaded by then. A name that is too long: root may look everywhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    assert find(StandIn()) == StandIn().measure()
    assert f"cannot look for saved profiles in {profile_dir()}: File name too long" in caplog.text


def test_without_a_home_directory_the_machine_is_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_no_home(monkeypatch)
    assert find(StandIn()) == StandIn().measure()
    assert "cannot look for saved profiles: this user has no home directory" in caplog.text


def test_measuring_to_save_ignores_what_is_saved(saved: Path, tmp_path: Path) -> None:
    (saved / "a.json").write_text(profile_of().to_json())
    bench = StandIn()
    profile = find(bench, save_profile=str(tmp_path / "new.json"))
    assert bench.measured == 1
    assert Profile.from_json((tmp_path / "new.json").read_text()) == profile != profile_of()
    with pytest.raises(ConfigError, match=r"save_profile: cannot write .*none/new\.json"):
        find(bench, save_profile=str(tmp_path / "none" / "new.json"))


def test_a_named_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "named.json"
    file.write_text(profile_of(replace(GQA, name="theirs")).to_json())
    with pytest.raises(ConfigError) as error:
        find(StandIn(), profile=str(file))
    assert str(error.value).startswith(f"--hcache-profile: {file} is of the model theirs")
    assert "\n" not in str(error.value)
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"--hcache-profile: .* is no profile"):
            find(StandIn(), profile=str(file))
    with pytest.raises(ConfigError, match="No such file"):
        find(StandIn(), profile=str(tmp_path / "none"))


def test_a_named_profile_of_another_machine_is_used_with_a_warning(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / "a.json").write_text(profile_of().to_json())
    theirs = replace(profile_of(run=7), machine="theirs")
    (tmp_path / "named.json").write_text(theirs.to_json())
    bench = StandIn()
    assert find(bench, profile=str(tmp_path / "named.json")) == theirs
    assert not bench.measured
    assert "it was made on 'theirs'; this is 'this machine; /disk'" in caplog.text


# -- what is stored ------------------------------------------------------------------------------


def stored(
    disk: DiskStore | None,
    profile: Profile | None,
    shape: ModelShape = MHA,
    **settings: Any,
) -> Split:
    on_disk = None if disk is None else mix_on(disk, shape)
    methods = choose_stored(HCacheConfig.from_settings(settings), profile, shape, on_disk)
    assert len(methods) == shape.num_layers
    if disk is not None:
        sizes = {HIDDEN: 64 * shape.hidden_row_bytes, KV: 64 * shape.kv_row_bytes}
        layer_bytes = tuple(sizes[method] for method in methods)
        run = Run(b"a namespace 4567", (secrets.token_bytes(32),), 0, layer_bytes)
        disk.write_run(run, lambda layer: [np.zeros(layer_bytes[layer], np.uint8)])
    return Split.of(methods)


def test_the_fastest_mix_is_stored(open_disk: Callable[[], DiskStore]) -> None:
    mixed = stored(None, profile_of())
    assert mixed.hidden > mixed.kv > 0
    assert stored(open_disk(), profile_of()) == mixed
    assert stored(None, profile_of(project=0.1)) == Split(0, 8, 0)
    assert stored(None, profile_of(hidden=20, project=30)) == Split(0, 0, 8)


@pytest.mark.parametrize(("method", "split"), [("hidden", Split(0, 8, 0)), ("kv", Split(0, 0, 8))])
def test_a_method_that_is_given_decides(
    open_disk: Callable[[], DiskStore], method: str, split: Split
) -> None:
    assert stored(open_disk(), profile_of(), method=method) == split


def test_grouped_queries_never_store_hidden_states(open_disk: Callable[[], DiskStore]) -> None:
    """Not by costs, not for want of a profile, and not because of what is on disk: they are larger there."""
    for project in (0.0, 1.0, 30.0):
        profile = profile_of(GQA, hidden=8, kv=4, project=project)
        assert stored(None, profile, GQA) == Split(0, 0, 8)
    assert stored(None, None, GQA) == Split(0, 0, 8)
    assert stored(None, None, MHA) == Split(0, 8, 0)


def test_what_is_on_disk_keeps_its_mix_over_restarts(open_disk: Callable[[], DiskStore]) -> None:
    first = stored(open_disk(), profile_of(project=6))
    slightly = profile_of(project=7)  # 46 us a token with the first mix, 44 with the best
    assert stored(None, slightly) != first
    assert stored(open_disk(), slightly) == first
    assert stored(open_disk(), slightly) == first


@pytest.mark.parametrize(
    ("namespace_id", "num_layers"),
    [(b"another model 16", 5), (SCRATCH_NAMESPACE, 6), (SCRATCH_NAMESPACE, MHA.num_layers)],
)
def test_also_behind_chunks_of_another_model_and_those_of_a_measurement_that_was_killed(
    open_disk: Callable[[], DiskStore], namespace_id: bytes, num_layers: int
) -> None:
    first = stored(open_disk(), profile_of(project=6))
    sizes = (64 * MHA.hidden_row_bytes,) * num_layers
    run = Run(namespace_id, (secrets.token_bytes(32),), 0, sizes)
    open_disk().write_run(run, lambda layer: [np.zeros(sizes[layer], np.uint8)])
    assert stored(open_disk(), profile_of(project=7)) == first


def test_another_mix_that_is_much_faster_replaces_it(
    open_disk: Callable[[], DiskStore], caplog: pytest.LogCaptureFixture
) -> None:
    assert stored(open_disk(), profile_of(project=0.1)) == Split(0, 8, 0)
    assert not caplog.messages
    assert stored(open_disk(), profile_of(hidden=20, project=30)) == Split(0, 0, 8)
    assert "what is stored by hidden is not used any more" in caplog.text
    caplog.clear()
    assert stored(open_disk(), profile_of(hidden=20, project=30)) == Split(0, 0, 8)
    assert not caplog.messages


def test_what_is_on_disk_stays_where_the_disk_was_not_measured(open_disk: Callable[[], DiskStore]) -> None:
    """The write budget was used up, say: costs of host memory alone decide nothing for a disk."""
    assert stored(open_disk(), profile_of(project=0.1)) == Split(0, 8, 0)
    kv_wins = profile_of(hidden=20, project=30, tiers=("host",))
    assert stored(None, kv_wins) == Split(0, 0, 8)
    assert stored(open_disk(), kv_wins) == Split(0, 8, 0)
    assert stored(open_disk(), None) == Split(0, 8, 0)


@pytest.mark.parametrize(("project", "is_kept"), [(12, True), (16, False)])
def test_half_as_fast_again_decides(
    open_disk: Callable[[], DiskStore], project: float, is_kept: bool
) -> None:
    """All hidden states: 8 projections and one read of 10 us that nothing hides; K and V: 8 reads of 10 us."""
    assert stored(open_disk(), profile_of(project=0.1)) == Split(0, 8, 0)
    profile = profile_of(hidden=10, kv=10, project=project, run=1e6)
    assert (stored(open_disk(), profile) == Split(0, 8, 0)) is is_kept


def test_texts() -> None:
    assert describe((HIDDEN, HIDDEN)) == "hidden"
    assert describe((KV, KV)) == "kv"
    assert describe((KV, HIDDEN, HIDDEN)) == "2 hidden + 1 kv"


def test_the_command_line_plans_as_the_server_does() -> None:
    for tiers in (("host",), ("host", "disk")):
        profile = profile_of(tiers=tiers)
        shown = plan_server.ServerPlan.of(profile)
        assert shown.tier == tiers[-1]
        assert shown.split == stored(None, profile)
    assert json.dumps(shown.data())
