"""``hcache profile`` as a user types it, with a stand-in for the server."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hcache.cli import main as command
from sglang_hcache.cli.profile import run as profile_run
from sglang_hcache.cli.profile.command import file_name
from sglang_hcache.cli.server.process import ServerProcessError
from sglang_hcache.core.config import profile_dir
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.plan.curves import CostCurve
from sglang_hcache.plan.profile import Profile, TierCurves
from sglang_hcache.plan.shapes import NAMED_SHAPES
from tests.made_profiles import made_profile

AUTO = ["--hcache-method", "auto"]
SHAPE = replace(NAMED_SHAPES["llama2-7b"], name="my model")


def line(fixed_us: float, token_us: float, squared_ns: float = 0.0, fit: float = 0.99) -> CostCurve:
    return CostCurve(
        fixed_s=fixed_us * 1e-6,
        per_token_s=token_us * 1e-6,
        per_token_squared_s=squared_ns * 1e-9,
        r_squared=fit,
    )


def profile_of(*, tiers: tuple[str, ...] = ("host", "disk"), fit: float = 0.99, **change: object) -> Profile:
    reads = {
        "host": TierCurves(hidden=line(100, 0.8192), kv=line(100, 1.6384)),
        "disk": TierCurves(hidden=line(250, 4.096), kv=line(250, 8.192), contention=0.42),
    }
    values: dict[str, Any] = {
        "model": SHAPE,
        "machine": "a machine; /disk",
        "versions": {"torch": "2"},
        "token_range": (64, 4096),
    }
    return made_profile(
        tiers={tier: reads[tier] for tier in tiers},
        project=line(30, 6, fit=fit),
        write=line(20, 0.5),
        run=line(300, 20, squared_ns=1.5),
        **values | change,
    )


class StandIn:
    """In place of :class:`ServerProcess`: saves ``profile`` where the settings say, and logs ``text``."""

    def __init__(
        self, profile: Profile | str | None, text: str = "", error: BaseException | None = None
    ) -> None:
        self.profile, self.text, self.error = profile, text, error
        self.arguments: list[str] = []
        self.settings: dict[str, object] = {}
        self.log = Path()
        self.is_running = False

    def __call__(
        self, arguments: list[str], *, log: Path, startup_timeout_s: float, extra_env: dict[str, str]
    ) -> StandIn:
        self.arguments, self.log = list(arguments), log
        (Path(extra_env["TMPDIR"]) / "socket").touch()  # as SGLang does, which leaves it
        assert startup_timeout_s > 600
        place = arguments.index("--hcache-config")
        self.settings = yaml.safe_load(Path(arguments[place + 1]).read_text())
        del self.arguments[place : place + 2]
        return self

    def start(self, progress: object) -> None:
        self.is_running = True
        if self.profile is not None:
            text = self.profile if isinstance(self.profile, str) else self.profile.to_json()
            Path(str(self.settings["save_profile"])).write_text(text)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.is_running = False

    kill = stop

    def log_text(self) -> str:
        return self.text


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs ``hcache profile`` with ``server``; returns (exit status, standard output, standard error)."""

    def run_(server: StandIn, *arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(profile_run, "ServerProcess", server)
        monkeypatch.setattr("sys.argv", ["hcache", "profile", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            command.main()
        assert not server.is_running
        return exit_info.value.code, *capsys.readouterr()

    return run_


def test_table_of_what_was_measured(run):
    status, out, err = run(StandIn(profile_of()), "--model-path", "m", "--hcache-dirs", "/disk")
    assert (status, err) == (0, "")
    lines = [" ".join(text.split()) for text in out.splitlines()]
    for text in (
        "my model: 32 layers, hidden size 4096, 32 heads, 2 bytes a value",
        "Machine a machine; /disk",
        "Versions torch 2",
        "host hidden states 10.0 0.100 0.990 0.00",
        "host K and V 10.0 0.100 0.990 0.00",
        "disk hidden states 2.00 0.250 0.990 0.42",
        "disk K and V 2.00 0.250 0.990 0.42",
        "project hidden states 30.0 6.00 - 0.990",
        "write K and V 20.0 0.500 - 0.990",
        "recompute the layer 300 20.0 1.50 0.990",
        f"Saved {profile_dir() / file_name(profile_of())}",
    ):
        assert text in lines
    assert any(text.startswith("Measured 64 to 4,096 tokens, times of one layer") for text in lines)
    same = "the same model, dtype, machine, versions, attention backend, quantization, --tp-size and disk directories"
    assert f"Servers started with {same} use it by themselves" in out
    assert f"restoring pays: hcache plan --profile {profile_dir() / file_name(profile_of())}\n" in out
    assert "Warning" not in out


def test_json(run, tmp_path):
    profile = profile_of()
    status, out, err = run(
        StandIn(profile), "--model-path", "m", "--json", "--out", tmp_path / "p.json", "--hcache-dirs", "/d"
    )
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["file"] == str(tmp_path / "p.json")
    assert data["read_bytes_per_s"] == {
        "host": {"hidden": pytest.approx(10e9), "kv": pytest.approx(10e9)},
        "disk": {"hidden": pytest.approx(2e9), "kv": pytest.approx(2e9)},
    }
    assert data["warnings"] == []
    assert Profile.from_json(json.dumps(data["profile"])) == profile
    assert Profile.from_json((tmp_path / "p.json").read_text()) == profile
    assert not profile_dir().exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "scratch"]


def test_a_poor_fit_is_a_warning(run):
    out = run(StandIn(profile_of(fit=0.89)), "--model-path", "m")[1]
    assert "Warning: R² below 0.9 (project hidden states): something else kept the machine busy" in out


def test_without_directories_only_the_host_tier(run):
    out = run(StandIn(profile_of(tiers=("host",))), "--model-path", "m")[1]
    assert "Only host memory was measured. Name the disk tier's directories with --hcache-dirs." in out
    assert "quantization, --tp-size and no disk tier use it" in out


def test_a_disk_tier_that_could_not_be_read_is_told(run):
    text = "[2026-01-01] hcache: reads from the disk tier could not be measured: full\n"
    out = run(StandIn(profile_of(tiers=("host",)), text), "--model-path", "m", "--hcache-dirs", "/d")[1]
    assert "Warning: reads from the disk tier could not be measured: full\n" in out
    assert "Only host memory" not in out


# -- where it is saved ---------------------------------------------------------------------------


def test_the_same_circumstances_replace_the_same_file(run):
    first = StandIn(profile_of())
    run(first, "--model-path", "m")
    (path,) = profile_dir().iterdir()
    assert path.name == file_name(profile_of())
    assert path.name.startswith("my-model-")
    assert len(path.stem.removeprefix("my-model-")) == 8
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = profile_of(fit=0.95)
    run(StandIn(again), "--model-path", "m")
    assert [Profile.from_json(file.read_text()) for file in profile_dir().iterdir()] == [again]
    renamed = profile_of(model=replace(SHAPE, name="other"))
    run(StandIn(renamed), "--model-path", "m")
    assert [Profile.from_json(file.read_text()) for file in profile_dir().iterdir()] == [renamed]


@pytest.mark.parametrize(
    "change",
    [{"machine": "b"}, {"versions": {"torch": "3"}}, {"model": replace(SHAPE, num_layers=31)}],
    ids=["machine", "versions", "sizes"],
)
def test_other_circumstances_get_another_file(run, change):
    run(StandIn(profile_of()), "--model-path", "m")
    run(StandIn(profile_of(**change)), "--model-path", "m")
    assert len(list(profile_dir().iterdir())) == 2


@pytest.mark.parametrize("name", ["../../etc/x", "...", "a/b", "ü" * 300])
def test_names_of_models_make_no_paths(name):
    made = file_name(profile_of(model=replace(SHAPE, name=name)))
    assert os.sep not in made
    assert not made.startswith((".", "-"))
    assert len(made) < 100


# -- what the server gets ------------------------------------------------------------------------


def test_arguments_and_settings_of_the_server(run, tmp_path):
    (tmp_path / "server.yaml").write_text(
        "dirs: [/from/file]\nhost_size: 1GB\nrestore_deadline_s: 8\nmethod: kv\nmeasure_s: 1\nprofile: /old\n"
    )
    server = StandIn(profile_of())
    status, _, err = run(
        server,
        *("--hcache-host-size", "2GB", "--model-path", "m", "-tp", "1", "--seconds", "7"),
        *(f"--hcache-config={tmp_path / 'server.yaml'}", "--dtype=float32", "--skip-server-warmup"),
    )
    assert status == 0
    assert err == (
        "hcache: --hcache-method kv: measured as auto, for a profile has the costs of all methods\n"
    )
    saved = Path(str(server.settings.pop("save_profile")))
    assert saved.parent == server.log.parent
    assert server.settings == {
        "dirs": ["/from/file"],
        "host_size": "2GB",
        "restore_deadline_s": 8,
        "method": "auto",
        "measure_s": 7.0,
    }
    assert server.arguments[:2] == ["--model-path", "m"]
    assert server.arguments[4:] == ["-tp", "1", "--dtype=float32", "--skip-server-warmup", *AUTO]


def test_given_pool_size_wins(run):
    server = StandIn(profile_of())
    run(server, "--model-path", "m", "--max-total-tokens", "99")
    places = [index for index, argument in enumerate(server.arguments) if argument == "--max-total-tokens"]
    assert [server.arguments[place + 1] for place in places] == ["32768", "99"]


@pytest.mark.parametrize("method", ["kv", "hybrid", "hidden", "recompute"])
def test_all_methods_are_measured_whatever_is_served_with(run, method):
    """The server would measure a part, and leave a profile of it to all servers."""
    server = StandIn(profile_of())
    status, out, err = run(server, "--model-path", "m", "--hcache-method", method, "--json")
    assert (status, bool(json.loads(out))) == (0, True)
    assert err.startswith(f"hcache: --hcache-method {method}: measured as auto")
    assert err.count("\n") == 1
    assert server.settings["method"] == "auto"
    run(server, "--model-path", "m", "--hcache-meth", method)  # as SGLang understands it
    assert server.arguments[-2:] == AUTO


def test_nothing_is_said_of_auto(run):
    for given in ([], ["--hcache-method", "auto"]):
        assert run(StandIn(profile_of()), "--model-path", "m", *given)[2] == ""


def test_sglangs_own_file_counts(run, tmp_path):
    file = tmp_path / "server.yaml"
    tier = "hcache-method: kv\nhcache-dirs: /from/file\nhcache-host-size: 1GB\nhcache-profile: /old\n"
    file.write_text(f"max-total-tokens: 99\n{tier}")
    server = StandIn(profile_of())
    given = ["--config", str(file), "--hcache-host-size", "2GB"]
    status, out, err = run(server, "--model-path", "m", *given)
    assert (status, "Only host memory" in out) == (0, False)
    assert "--hcache-method kv: measured as auto" in err
    assert server.arguments == ["--model-path", "m", *given[:2], *AUTO]
    del server.settings["save_profile"]
    assert server.settings == {"dirs": "/from/file", "host_size": "2GB", "method": "auto", "measure_s": 5.0}
    file.write_text("hierarchical-cache: off\n")
    status, _, err = run(server, "--model-path", "m", *given)
    assert status == 2
    assert err.startswith("hcache: error: --hierarchical-cache: 'off' is not allowed")


# -- what may go wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model-path is missing"),
        (["--model-path", "/no/such"], "--model-path: /no/such does not exist"),
        (["--model-path", "m", "--seconds", "0"], "--seconds: 0 is not allowed"),
        (["--model-path", "m", "--seconds", "nan"], "--seconds: nan is not allowed"),
        (["--model-path", "m", "--seconds", "61"], "--seconds: 61 is not allowed"),
        (["--model-path", "m", "--hierarchical-cache", "off"], "--hierarchical-cache: 'off' is not allowed"),
        (["--model-path", "m", "--hcache-profile", "p"], "--hcache-profile: leave it out"),
        (["--model-path", "m", "--hcache-dirs"], "--hcache-dirs: expected one argument"),
        (["--model-path", "m", "--hcache-method", "x"], "--hcache-method: 'x' is not allowed"),
        (["--model-path", "m", "--hcache-config", "{dir}/none"], "--hcache-config: cannot read '{dir}/none'"),
        (
            ["--model-path", "m", "--hcache-config", "{dir}/twice"],
            "--hcache-config: cannot read '{dir}/twice': line 1: 'dirs' is named twice",
        ),
        (["--model-path", "m", "--hcache-config", "{dir}/list"], "--hcache-config: '{dir}/list' must hold"),
        (["--model-path", "m", "--hcache-config", "{dir}/date"], "--hcache-config: cannot read '{dir}/date'"),
        (["--model-path", "m", "--hcache-config", "{dir}/odd"], "unknown setting 'colour'"),
        (["--model-path", "m", "--out", "{dir}/none/p"], "--out: cannot write {dir}/none/p: No such file"),
        (["--model-path", "m", "--out", "{dir}"], "--out: {dir} is a folder; name a file"),
    ],
)
def test_errors_before_a_server_is_started(run, tmp_path, arguments, message):
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "date").write_text("dirs: 2026-02-30")
    (tmp_path / "odd").write_text("colour: red")
    (tmp_path / "twice").write_text("dirs: /a\ndisk_size: 1GB\ndirs: /b")
    server = StandIn(profile_of())
    status, out, err = run(server, *(text.replace("{dir}", str(tmp_path)) for text in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("hcache: error: " + message.replace("{dir}", str(tmp_path)))
    assert err.count("\n") == 1
    assert server.arguments == []


def nothing_is_left(tmp_path: Path) -> bool:
    return not [path for path in tmp_path.rglob("*") if path.is_file()] and not list(
        (tmp_path / "scratch").iterdir()
    )


def test_a_server_that_does_not_start(run, tmp_path):
    server = StandIn(None, error=ServerProcessError("--hcache-dirs: no room\n--x: no"))
    status, out, err = run(server, "--model-path", "m")
    assert (status, out) == (2, "")
    assert err == "hcache: error: --hcache-dirs: no room\nhcache: error: --x: no\n"
    assert nothing_is_left(tmp_path)


def test_a_server_that_fails_after_measuring_has_measured(run):
    error = ServerProcessError("--hcache-host-size: too much")
    server = StandIn(profile_of(), error=error)
    status, out, _ = run(server, "--model-path", "m")
    assert status == 0
    assert "Warning: after measuring, the server did not start: --hcache-host-size: too much" in out
    assert len(list(profile_dir().iterdir())) == 1


@pytest.mark.parametrize("saved", [None, "{", "{}"])
def test_a_server_that_saves_no_profile(run, tmp_path, saved):
    status, out, err = run(StandIn(saved), "--model-path", "m")
    assert (status, out) == (2, "")
    assert err.startswith("hcache: error: the server saved no profile that we can read")
    assert nothing_is_left(tmp_path)


def test_ctrl_c_stops_the_server(run, tmp_path):
    status, out, _ = run(StandIn(None, error=KeyboardInterrupt()), "--model-path", "m")
    assert status not in (0, None)
    assert "Saved" not in out
    assert nothing_is_left(tmp_path)


def test_what_cannot_be_saved_is_said(monkeypatch, tmp_path):
    from sglang_hcache.cli.profile import command as module

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match=r"--out: cannot write .*p\.json: No space left on device"):
        module._save(profile_of(), tmp_path / "p.json", replaces_others=False)
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "out", ["{dir}/pipe", "{dir}/link", "/dev/null", "{dir}/nowhere", "/dev/fd/{log}", "/proc/self/fd/{log}"]
)
def test_what_is_no_file_of_its_own_is_refused(run, tmp_path, out):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("/dev/null")
    with (tmp_path / "log").open("w+") as log:
        log.write("a line")
        log.flush()
        out = out.format(dir=tmp_path, log=log.fileno())
        server = StandIn(profile_of())
        status, _, err = run(server, "--model-path", "m", "--out", out)
    assert status == 2
    assert (
        err
        == f"hcache: error: --out: {out} is a stream, a pipe or a device; name a file (--json prints the profile)\n"
    )
    assert server.arguments == []
    assert (tmp_path / "log").read_text() == "a line"


def test_shared_memory_holds_files(run):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = Path(folder) / "profile"
        assert run(StandIn(profile_of()), "--model-path", "m", "--out", str(out))[0] == 0
        assert Profile.read(out) == profile_of()


def test_a_link_to_a_file_stays(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    (tmp_path / "folder").mkdir()
    for profile in (profile_of(), profile_of(machine="another")):
        assert run(StandIn(profile), "--model-path", "m", "--out", str(tmp_path / "link"))[0] == 0
        assert (tmp_path / "link").is_symlink()
        assert Profile.read(tmp_path / "folder" / "file") == profile
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_help_teaches(run):
    status, out, _ = run(StandIn(None), "--help")
    assert status == 0
    text = " ".join(out.split())
    for word in ("--model-path", "--out", "--seconds", "--json", "--hcache-dirs", "hcache serve", "auto"):
        assert word in text
