"""The samples for Kubernetes, systemd and Docker: their flags exist, and they keep what the pages say of them."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_hcache.core.config import COMMAND_LINE_FLAGS, FLAG_FIELDS, HCacheConfig, flag_of
from sglang_hcache.core.units import parse_size

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "configs/kubernetes/statefulset.yaml"
UNIT = ROOT / "configs/systemd/hcache.service"
DOCKERFILE = ROOT / "configs/docker/Dockerfile"
STOPPING_S = 20
"""That a stop takes beside the longest request."""


@cache
def manifest() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict[str, Any]:
    return manifest()["StatefulSet"]["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    return pod()["containers"][0]


def unit_settings() -> dict[str, str]:
    text = UNIT.read_text().replace("\\\n", " ")
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))


def server_arguments(sample: str) -> list[str]:
    """What SGLang's parser gets."""
    if sample == "kubernetes":
        return container()["args"]
    if sample == "systemd":
        return shlex.split(unit_settings()["ExecStart"])[3:]
    text = DOCKERFILE.read_text().replace("\\\n#", "")
    return shlex.split(re.search(r"docker run .* sglang-hcache:0.1.0 (.*)", text)[1])


def tier_settings(sample: str) -> HCacheConfig:
    from sglang.srt.server_args import ServerArgs

    from sglang_hcache.sglang_plugin.launch.flags import add_arguments

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    add_arguments(parser)
    arguments, unknown = parser.parse_known_args(server_arguments(sample))
    assert not unknown
    assert arguments.hierarchical_cache == "hcache"
    given = {field: getattr(arguments, f"hcache_{field}") for field in FLAG_FIELDS}
    return HCacheConfig.from_settings({field: value for field, value in given.items() if value is not None})


@pytest.mark.parametrize("sample", ["kubernetes", "systemd", "docker"])
def test_its_flags_are_the_servers(sample: str) -> None:
    config = tier_settings(sample)
    assert config.dirs
    assert config.host_size == 64 * 10**9


@pytest.mark.parametrize("sample", ["kubernetes", "systemd", "docker"])
def test_what_an_orchestrator_starts_survives_a_broken_disk(sample: str) -> None:
    config = tier_settings(sample)
    assert config.disk_at_start == "optional"
    assert config.disk_write_budget
    assert "%" in str(config.disk_free_floor)


def prepare(
    command: list[str], folder: Path, *, fails: str = "-", mounted: bool = True
) -> tuple[int, list[str]]:
    """What is run before a server, with programs that only say what they were told.

    Args:
        fails: the directory that cannot be made.

    Returns:
        Its exit status, and the directories that it made for the server's user alone.
    """
    programs = {
        "install": f'for last; do :; done; [ "$last" != {fails} ] && echo "$@"',
        "mountpoint": f"[ $2 = /mnt/nvme0 ] && {str(mounted).lower()}",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        command,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert all(words[:3] == ["-d", "-m", "0700"] and words[4] == words[6] for words in said)
    return done.returncode, [f"{words[4]}:{words[-1]}" for words in said]


def test_a_pod_starts_that_cannot_make_its_directory(tmp_path: Path) -> None:
    (init,) = pod()["initContainers"]
    (directory,) = tier_settings("kubernetes").dirs
    (home,) = [variable["value"] for variable in container()["env"] if variable["name"] == "HOME"]
    user = container()["securityContext"]["runAsUser"]
    assert prepare(init["command"], tmp_path) == (0, [f"{user}:{directory}", f"{user}:{home}"])
    assert prepare(init["command"], tmp_path, fails=str(directory)) == (0, [f"{user}:{home}"])
    (volume,) = [mount["name"] for mount in container()["volumeMounts"] if mount["mountPath"] == home]
    assert {"name": volume, "mountPath": home} in init["volumeMounts"]
    assert {"name": volume, "emptyDir": {}} in pod()["volumes"], "the tier's disk may be broken"


def test_the_unit_starts_without_its_drive(tmp_path: Path) -> None:
    settings = unit_settings()
    prefixes, *command = shlex.split(settings["ExecStartPre"])
    assert prefixes == "-+/bin/sh"
    (directory,) = tier_settings("systemd").dirs
    command = ["/bin/sh", *command]
    assert prepare(command, tmp_path) == (0, [f"sglang:{directory}"])
    assert prepare(command, tmp_path, mounted=False)[1] == [], "on the disk below"
    assert not {name for name in settings if name.startswith("Requires")}
    for waits in ("Wants", "After"):
        (mount,) = [name for name in settings[waits].split() if name.endswith(".mount")]
        assert directory.is_relative_to("/" + mount.removesuffix(".mount").replace("-", "/"))


def test_pages_and_samples_name_flags_that_exist() -> None:
    known = {flag_of(field) for field in FLAG_FIELDS} | set(COMMAND_LINE_FLAGS)
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *(path for path in ROOT.glob("configs/*/*"))]
    named = {
        (path.name, flag)
        for path in files
        for flag in re.findall(r"--(?:hcache|hierarchical-cache)[a-z-]*[a-z]", path.read_text())
    }
    assert {(name, flag) for name, flag in named if flag not in known and flag != "--hcache"} == set()


def test_probes_wait_for_a_health_call_and_for_the_model() -> None:
    """SGLang's /health sleeps for a second before it looks for an answer."""
    probes = {kind: container()[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} == {"/health"}
    assert all(probe["timeoutSeconds"] > 1 for probe in probes.values())
    patience = {kind: probe["periodSeconds"] * probe["failureThreshold"] for kind, probe in probes.items()}
    assert patience["startup"] >= 1800
    assert patience["liveness"] >= 300


def test_the_pod_has_time_to_stop() -> None:
    _, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pod()["terminationGracePeriodSeconds"] >= int(seconds) + STOPPING_S + 120
    assert container()["command"][0] == "tini"


def test_the_pod_has_memory_and_disk_for_both_tiers() -> None:
    config = tier_settings("kubernetes")
    memory = container()["resources"]["limits"]["memory"]
    assert parse_size(f"{memory}B") > config.host_size + 8 * 2**30
    (claim,) = manifest()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    volume = parse_size(claim["spec"]["resources"]["requests"]["storage"] + "B")
    floor = float(str(config.disk_free_floor).rstrip("%"))
    assert floor > 10  # kubelet's nodefs.available
    assert config.disk_size < volume * (1 - floor / 100)


def test_the_directory_is_the_servers_own() -> None:
    user = container()["securityContext"]["runAsUser"]
    assert "fsGroup" not in MANIFEST.read_text().replace("No fsGroup", "")
    assert f"USER {user}" in DOCKERFILE.read_text().splitlines()


def file_of_keys(sample: str) -> str:
    """Where the server finds it; checks that it is brought there."""
    if sample == "kubernetes":
        (volume,) = [volume for volume in pod()["volumes"] if "secret" in volume]
        (mount,) = [mount for mount in container()["volumeMounts"] if mount["name"] == volume["name"]]
        name = volume["secret"]["secretName"]
        assert f"kubectl create secret generic {name} --from-file=server.yaml\n" in MANIFEST.read_text()
        assert volume["secret"]["defaultMode"] == 0o444
        return f"{mount['mountPath']}/server.yaml"
    if sample == "systemd":
        return re.search(r"install -D -m 0640 -g sglang server.yaml (\S+)", UNIT.read_text())[1]
    made = re.search(r"install -D -m 0640 -g 10001 server.yaml (\S+)", DOCKERFILE.read_text())[1]
    mounts = dict(mount.split(":", 1) for mount in re.findall(r" -v (\S+)", DOCKERFILE.read_text()))
    path, _, mode = mounts[made].partition(":")
    assert mode == "ro"
    return path


@pytest.mark.parametrize(
    ("sample", "file"), [("kubernetes", MANIFEST), ("systemd", UNIT), ("docker", DOCKERFILE)]
)
def test_both_keys_are_in_a_file_and_not_on_the_command_line(sample: str, file: Path) -> None:
    arguments = server_arguments(sample)
    assert arguments[arguments.index("--config") + 1] == file_of_keys(sample), (
        "in two words: SGLang looks for those"
    )
    assert not [argument for argument in arguments if "api-key" in argument]
    assert (
        '# server.yaml: two lines, with the quotes: api-key: "KEY" and admin-api-key: "KEY"\n'
        in file.read_text()
    )


def test_a_stop_of_the_unit_is_no_failure_and_a_crash_restarts_it() -> None:
    settings = unit_settings()
    assert settings["SuccessExitStatus"] == "SIGKILL"
    assert settings["Restart"] == "always"
    assert int(settings["TimeoutStopSec"]) >= STOPPING_S + 120


def test_what_a_shell_of_the_units_user_profiles_the_server_finds() -> None:
    home = re.search(r"useradd .*--home-dir (\S+)", UNIT.read_text())[1]
    found = re.findall(r"\b(HOME|XDG_\w+)=(\S+)", UNIT.read_text())
    assert found == [("HOME", home)]


def test_what_the_unit_hides_it_does_not_use() -> None:
    settings = unit_settings()
    assert [settings[name] for name in ("ProtectHome", "PrivateTmp", "NoNewPrivileges")] == ["true"] * 3
    assert settings["ProtectSystem"] == "full", "with strict it cannot see a drive that is mounted again"
    used = re.findall(r"(?<=[\s=:])/[\w/.]+", "\n".join(f"={value}" for value in settings.values()))
    assert "/mnt/nvme0/hcache" in used
    assert not [path for path in used if path.startswith(("/home/", "/root/", "/tmp/", "/var/tmp/"))]


def test_the_pods_server_has_no_rights_that_it_does_not_need() -> None:
    rights = container()["securityContext"]
    assert rights["runAsNonRoot"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shlex.split(unit_settings()["ExecStart"])[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(program, sys.executable))
    result = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
