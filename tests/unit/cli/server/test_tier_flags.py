"""Arguments of ``hcache serve`` and ``hcache profile`` that are refused before SGLang starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hcache.cli.server import tier_flags
from sglang_hcache.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hcache-dsk-size", "2GB"], "did you mean --hcache-disk-size?"),
        (["--hcache_dirs=/a"], "did you mean --hcache-dirs?"),
        (["--hcache-segment-size", "1MB"], "segment_size has no flag; set it in the file of --hcache-config"),
        (["--hcache-host-size", "10 XB"], "--hcache-host-size: '10 XB' is not a size"),
        (["--hcache-host-size", "-1"], "--hcache-host-size"),
        (["--hcache-method=hiden"], "--hcache-method: 'hiden' is not allowed"),
        (["--hcache-dirs"], "--hcache-dirs: expected one argument"),
        (["--hierarchical-cache", "on"], "--hierarchical-cache: 'on' is not allowed; allowed: off, hcache"),
        (["--hcache-config", "/no/such/file.yaml"], "--hcache-config: cannot read"),
        (["--hcache-disk-size", "20", "GB"], "--hcache-disk-size: it takes one value, and 'GB' follows '20'"),
        (["--hcache-disk-size=20", "GB"], "--hcache-disk-size: it takes one value, and 'GB' follows '20'"),
        (["--hcache-dirs", "/a", "/b", "/c"], "--hcache-dirs: it takes one value, and '/b' follows '/a'"),
        (
            ["--hierarchical-cache", "off", "on"],
            "--hierarchical-cache: it takes one value, and 'on' follows 'off'",
        ),
        (["--config=server.yaml"], "write --config FILE"),
    ],
)
def test_what_the_server_would_refuse_later(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tier_flags.check(["--model-path", "m", *arguments, "--port", "1"])
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hcache-host-size", "10 GB", "--hcache-disk-size=10gb", "--hicache-io-backend", "kernel"],
        ["--stop", "a", "b", "--hcache-dirs", "/a,/b", "-h"],
        ["--hcache-dir", "/a"],  # abbreviated: SGLang accepts it, or says which flags it may mean
        ["--hcache-cpu-fixes", "--hierarchical-cache", "off"],
        ["--hierarchical-cache", "off", "--hcache-method", "hiden"],  # ignored there, with a warning
        ["--hierarchical-cache", "false", "--hcache-method", "hiden"],  # an `off` that YAML has read
        ["--config", "server.yaml", "--hcache-config", "/no/such/file.yaml"],
        ["-h"],
    ],
)
def test_the_rest_is_left_to_the_server(arguments: list[str]) -> None:
    tier_flags.check(["--model-path", "m", *arguments])


def test_the_file_is_checked_with_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "hcache.yaml"
    file.write_text("metod: kv\n")
    with pytest.raises(ConfigError, match="unknown setting 'metod'"):
        tier_flags.check([f"--hcache-config={file}"])
    file.write_text("method: hiden\n")
    tier_flags.check(["--hcache-config", str(file), "--hcache-method", "kv"])


def test_a_model_folder_that_is_none(tmp_path: Path) -> None:
    tier_flags.check_model(["meta-llama/Llama-3.1-8B", "model", None])
    for path, told in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is an empty folder"),
        ("~/m", "the shell"),
        (
            tmp_path / ("x" * 300),
            "File name too long",
        ),  # as where this user may not look; root may everywhere
    ):
        with pytest.raises(ConfigError, match=f"^--model-path: .*{told}"):
            tier_flags.check_model([str(path)])
    (tmp_path / "config.json").touch()
    tier_flags.check_model([str(tmp_path)])
