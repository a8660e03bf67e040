"""The YAML file of ``--hcache-config``: whatever is in it, an error is one that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hcache.core.errors import ConfigError
from sglang_hcache.sglang_plugin.launch.settings_file import read_settings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dirs: /a\ndisk_size: !!bool x", "line 2: 'x' is no bool"),
        ("disk_size: !!int ''", "line 1: '' is no int"),
        ("disk_size: !!timestamp x", "line 1: 'x' is no timestamp"),
        ("disk_max_age: 2026-02-30", "day is out of range"),
        ("!!map [1]", "expected a mapping node, but found sequence"),
        ("dirs: !!set [1]", "expected a mapping node, but found sequence"),
        ("[" * 5000, "it is nested too deeply"),
        ("dirs: /a\ndirs: /b", "line 1: 'dirs' is named twice"),
        ("dirs: [", "expected the node content"),
    ],
)
def test_what_cannot_be_read_names_the_file(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "hcache.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_settings(file, "--hcache-config")
    assert str(error.value).startswith(f"--hcache-config: cannot read '{file}': ")
    assert told in str(error.value)


def test_a_file_that_need_not_be_strict(tmp_path: Path) -> None:
    """SGLang's own: it takes the last."""
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nport: 2\n")
    assert read_settings(file, "--config", is_strict=False) == {"port": 2}
