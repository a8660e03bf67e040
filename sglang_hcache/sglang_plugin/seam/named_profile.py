"""The profile that a user named: looked at before anything is loaded, and used when the model is."""

from __future__ import annotations

from pathlib import Path

from sglang_hcache.plan.profile import Profile
from sglang_hcache.plan.shapes import ModelShape


def named_profile(path: Path, model: ModelShape) -> Profile:
    """What ``--hcache-profile`` names. Raises ConfigError: it cannot be read, is none, or is of another model."""
    hint = " with this --tp-size; make one with: hcache profile --model-path MODEL, and that --tp-size"
    return Profile.read_of(model, path, "--hcache-profile", hint)
