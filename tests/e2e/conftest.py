"""Models, made once a test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hcache.cli.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a small random model; equal arguments give the same folder."""
    made: dict[TinyModel, Path] = {}

    def build(**fields: object) -> Path:
        spec = TinyModel(**fields)  # type: ignore[arg-type]
        if spec not in made:
            made[spec] = tmp_path_factory.mktemp("model")
            write_tiny_model(made[spec], spec)
        return made[spec]

    return build


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("all_families") and not config.getoption("--all-families"):
            item.add_marker(pytest.mark.skip(reason="runs with --all-families"))
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
