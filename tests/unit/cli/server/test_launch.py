"""The command line that ``hcache serve`` becomes."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from sglang_hcache.cli.server import launch as module
from sglang_hcache.cli.server.launch import build_launch, port_in_use, prepare_launch
from sglang_hcache.core.errors import ConfigError

STUB = Path("/cache/stub")
LAUNCH = [sys.executable, "-P", "-m", "sglang.launch_server"]
CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
MODEL = ["--model-path", "m", "-tp", "1"]
CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"


def launch(*arguments: str, has_gpu: bool = True) -> list[str]:
    command, _ = build_launch(arguments, has_gpu=has_gpu, stub_dir=STUB)
    assert command[: len(LAUNCH)] == LAUNCH
    return command[len(LAUNCH) :]


def test_with_gpu_adds_the_tier_only():
    command, environment = build_launch(MODEL, has_gpu=True, stub_dir=STUB)
    assert command == [*LAUNCH, "--hierarchical-cache", "hcache", *MODEL]
    assert environment == {}


def test_without_gpu_adds_cpu_settings():
    command, environment = build_launch(MODEL, has_gpu=False, stub_dir=STUB)
    assert command == [*LAUNCH, "--hierarchical-cache", "hcache", *CPU, *MODEL]
    assert environment == {"SGLANG_USE_CPU_ENGINE": "1", "LD_LIBRARY_PATH": str(STUB)}


@pytest.mark.parametrize("given", [["--hierarchical-cache", "hcache"], ["--hierarchical-cache=hcache"]])
def test_tier_given_is_not_added_again(given):
    assert launch(*MODEL, *given) == [*MODEL, *given]


@pytest.mark.parametrize(
    "given", [["--hierarchical-cache", "off"], ["--hierarchical-cache=off"], ["--hierarchical-cache=false"]]
)
def test_off_is_dropped(given):
    assert launch(*given, *MODEL) == MODEL
    assert launch(*MODEL, *given, has_gpu=False) == [*CPU, *MODEL]


def test_last_tier_setting_wins():
    both = ["--hierarchical-cache", "hcache", "--hierarchical-cache", "off"]
    assert launch(*both, *MODEL) == MODEL
    assert launch(*reversed(both)) == list(reversed(both))


def test_wrong_tier_value_is_left_for_sglang_to_refuse():
    assert launch("--hierarchical-cache", "on") == ["--hierarchical-cache", "on"]


def test_given_cpu_settings_are_kept():
    given = ["--device=cpu", "--attention-backend", "intel_amx"]
    added = ["--hierarchical-cache", "hcache", "--disable-overlap-schedule"]
    assert launch(*given, has_gpu=False) == [*added, *given]


def test_another_device_gets_no_cpu_settings():
    command, environment = build_launch(["--device", "xpu"], has_gpu=False, stub_dir=STUB)
    assert command == [*LAUNCH, "--hierarchical-cache", "hcache", "--device", "xpu"]
    assert environment == {}


def test_similar_flags_are_not_ours():
    given = ["--device-memory", "off", "--hierarchical-cache-x=off"]
    assert launch(*given, has_gpu=False) == ["--hierarchical-cache", "hcache", *CPU, *given]


@pytest.fixture
def in_file(tmp_path):
    """Writes SGLang's own file of arguments; the arguments that name it."""

    def write(text: str) -> list[str]:
        (tmp_path / "server.yaml").write_text(text)
        return ["--config", str(tmp_path / "server.yaml")]

    return write


@pytest.mark.parametrize("name", ["hierarchical-cache", "hierarchical_cache"])
@pytest.mark.parametrize("mode", ['"off"', "off", "hcache"])
def test_the_tier_of_sglangs_file_is_not_overruled(in_file, name, mode):
    given = [*MODEL, *in_file(f"{name}: {mode}\n")]
    assert launch(*given) == given
    off = ["--hierarchical-cache", "off"]  # dropped, it would leave the tier to the file
    assert launch(*given, *off) == [*given, *off]


def test_cpu_settings_of_sglangs_file_are_not_overruled(in_file):
    given = in_file("device: cpu\nattention-backend: intel_amx\ndisable-overlap-schedule: false\n")
    assert launch(*given, has_gpu=False) == ["--hierarchical-cache", "hcache", *given]
    given = in_file(
        "port: 1\nport: 2\ndtype: float32\nforward-hooks: [{name: x}]\n"
    )  # twice: SGLang takes it
    assert launch(*given, has_gpu=False) == ["--hierarchical-cache", "hcache", *CPU, *given]


def test_another_device_in_sglangs_file_gets_no_cpu_settings(in_file, monkeypatch):
    given = in_file("device: xpu\n")
    command, environment = build_launch(given, has_gpu=False, stub_dir=STUB)
    assert (command, environment) == ([*LAUNCH, "--hierarchical-cache", "hcache", *given], {})
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "ensure_stub", lambda: pytest.fail("nothing runs on the CPU"))
    assert "OMP_WAIT_POLICY" not in prepare_launch(given)[1].keys() - os.environ.keys()
    cpu = ["--device", "cpu"]  # SGLang takes the last
    assert launch(*given, *cpu, has_gpu=False) == ["--hierarchical-cache", "hcache", *CPU[2:], *given, *cpu]


@pytest.mark.parametrize(
    "text", ["device: [", "- device", "!!map [1]", "device: !!bool x", "", "[" * 5000], ids=range(6)
)
def test_a_file_that_cannot_be_read_is_left_to_sglang(in_file, text):
    given = in_file(text)
    assert launch(*given, has_gpu=False) == ["--hierarchical-cache", "hcache", *CPU, *given]


@pytest.mark.parametrize("given", [["--config", "/no/such.yaml"], ["--config"]])
def test_a_file_that_is_not_there_is_left_to_sglang(given):
    assert launch(*given, has_gpu=False) == ["--hierarchical-cache", "hcache", *CPU, *given]


def test_prepare_builds_the_stub_on_cpu_only(monkeypatch):
    def no_compiler():
        raise ConfigError("no compiler")

    monkeypatch.setattr(module, "ensure_stub", no_compiler)
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    assert prepare_launch(MODEL)[0] == [*LAUNCH, "--hierarchical-cache", "hcache", *MODEL]
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="no compiler"):
        prepare_launch(MODEL)


def test_prepare_returns_the_whole_environment(monkeypatch):
    monkeypatch.setattr(module, "ensure_stub", lambda: STUB)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("KEPT", "yes")
    environment = prepare_launch(MODEL)[1]
    assert environment["LD_LIBRARY_PATH"] == f"{STUB}:/mine"
    assert environment["KEPT"] == "yes"


@pytest.mark.parametrize("tier", [(), ("--hierarchical-cache", "off")])
def test_threads_do_not_spin_on_a_cpu_with_the_tier_and_without(monkeypatch, tier):
    """Or the two could not be compared."""
    monkeypatch.setattr(module, "ensure_stub", lambda: STUB)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert prepare_launch([*MODEL, *tier])[1]["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert prepare_launch([*MODEL, *tier])[1]["OMP_WAIT_POLICY"] == "active"


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores, without a GPU, where the user has set nothing."""
    monkeypatch.setattr(module, "ensure_stub", lambda: STUB)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "usable_cores", lambda: [4, 6])
    monkeypatch.delenv(CORES_OF_RANKS, raising=False)


def cores_of_ranks(*arguments: str) -> str | None:
    return prepare_launch(arguments)[1].get(CORES_OF_RANKS)


@pytest.mark.parametrize(
    "given",
    [
        ["--tp-size", "2"],
        ["--tp-size=2"],
        ["--tp", "2"],
        ["--tensor-parallel-size", "2"],
        ["--tp", "4", "--tp-size", "2"],
        ["--tp-size", "4", "--tp=2"],
    ],
)
@pytest.mark.parametrize("tier", [(), ("--hierarchical-cache", "off")])
def test_ranks_on_a_cpu_share_its_cores(two_cores, given, tier):
    assert cores_of_ranks("--model-path", "m", *given, *tier) == "4|6"


def test_ranks_of_sglangs_file_count(two_cores, in_file):
    given = in_file("tp_size: 2\n")
    assert cores_of_ranks(*given) == "4|6"
    assert cores_of_ranks(*given, "--tp-size", "1") is None


@pytest.mark.parametrize(
    "given", [[], ["--tp-size", "1"], ["--tp-size", "x"], ["--tp-size", "-2"], ["--tp-size"]]
)
def test_one_rank_and_what_is_no_number_are_left_to_sglang(two_cores, given):
    assert cores_of_ranks(*MODEL[:2], *given) is None
    assert cores_of_ranks(*MODEL[:2], "--tp-size", "9" * 30) is None, "not a variable of that length"


def test_ranks_on_another_device_are_left_to_sglang(two_cores, monkeypatch):
    assert cores_of_ranks("--device", "xpu", "--tp-size", "2") is None
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    assert cores_of_ranks("--tp-size", "2") is None


def test_what_the_user_sets_for_ranks_stays(two_cores, monkeypatch):
    monkeypatch.setenv(CORES_OF_RANKS, "all")
    assert cores_of_ranks("--tp-size", "2") == "all"


def test_a_port_in_use_is_told_at_once():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert port_in_use([*MODEL, "--port", port]) == f"127.0.0.1:{port}"
        assert port_in_use([*MODEL, f"--port={port}", "--host", "0.0.0.0"]) == f"0.0.0.0:{port}"
        assert port_in_use([*MODEL, "--port", str(int(port) + 2**16)]) is None, "there is no such port"
    assert port_in_use([*MODEL, "--port", "0"]) is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "x"],
        ["--port"],
        ["--port", "99999"],
        ["--host", "no such host"],
        ["--host", "a..b"],
        ["--config", "server.yaml"],
    ],
)
def test_an_address_that_is_none_is_left_for_sglang_to_refuse(arguments):
    assert port_in_use([*MODEL, *arguments]) is None
