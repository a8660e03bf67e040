"""What the demo needs whatever it shows: a model, a folder, and sizes for the tier."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_hcache.cli.paths import given_path
from sglang_hcache.cli.server.process import settings_arguments
from sglang_hcache.cli.tiny_model.model import TinyModel
from sglang_hcache.core.errors import ConfigError

# Wide for its depth: attention of a prompt's last tokens to all before them, which no restore saves, is then cheap
# beside the rest.
MODEL = TinyModel(layers=8, hidden=768, heads=12, max_position=8192)
TIER = "tier"
"""The disk tier's folder, in the demo's."""
MARK = ".hcache-demo"
"""Says that a folder is a demo's: what is named like our files in any other one is somebody's own."""


def tier_arguments(file: Path, *, disk_size: int, host_size: int, staging_size: int) -> list[str]:
    """Arguments of a server with a small tier, whose settings are written to ``file``; sizes in bytes."""
    settings = {
        "dirs": [str(file.parent / TIER)],
        "disk_size": disk_size,
        "disk_free_floor": "256MiB",
        "segment_size": "32MiB",
        "host_size": host_size,
        "staging_size": staging_size,
    }
    return settings_arguments(file, settings)


@contextlib.contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for model, disk tier and logs: ``keep``, or a temporary one that is removed at the end.

    Raises:
        ConfigError: ``keep`` cannot be made or written into, or holds what no demo wrote.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="hcache-demo-") as folder:
            yield Path(folder)
        return
    kept = given_path("--keep", keep)
    try:
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--keep: cannot make {kept}: {error.strerror}") from None
    if not os.access(kept, os.W_OK):
        raise ConfigError(f"--keep: cannot write into {kept}")
    mark = kept / MARK
    if not mark.exists():
        if any(kept.iterdir()):
            raise ConfigError(f"--keep: {kept} holds other files; name a new or empty folder")
        mark.touch()
    yield kept
